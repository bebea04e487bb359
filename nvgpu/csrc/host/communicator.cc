// The collectives of runtime.h for processes of one machine that share memory.
//
// Each communicator runs its operations in the order of the calls, on a thread of its own; sends have a second one, and
// sends and receives do not wait for each other: as if each pair of ranks had a communicator, which is how Paddle uses
// NCCL. Its interleaved pipeline asks for a receive before the send that its peers need to answer it.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "host/collectives.h"
#include "host/errors.h"
#include "host/rendezvous.h"
#include "host/segment.h"
#include "host/stream.h"
#include "host/transfers.h"
#include "runtime.h"

namespace nvgpu::runtime {

using host::Clock;
using host::Kind;
using host::Segment;
using host::Token;
using host::Tokens;
using host::Transfer;

namespace {
char* Bytes(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)); }
}  // namespace

struct Communicator {
  using Work = std::function<void(Segment&)>;

  Communicator(int file, int rank, int size) : segment(file, rank, size), main(segment), sender(segment) {}

  void Enqueue(Work work, Stream stream, Kind kind = Kind::kOther) {
    // The caller waits for all but receives, which its next send may have to precede: Paddle may reuse the memory of a
    // tensor as soon as it has asked for a collective on it, trusting an allocator that knows streams.
    auto token = std::make_shared<Token>();
    main.Push({std::move(work), host::Of(stream).Append(token, kind), token});
    if (kind != Kind::kReceive) host::WaitOrThrow({token});
  }
  // Copies the data first: neither the next receive nor an allocation that reuses the memory waits for a send.
  void EnqueueSends(std::vector<Transfer> sends, Stream stream) {
    host::WaitOrThrow(host::Of(stream).Others());
    auto copies = std::make_shared<std::deque<std::vector<char>>>();
    for (Transfer& send : sends) {
      copies->emplace_back(send.data, send.data + send.bytes);
      send.data = copies->back().data();
    }
    sender.Push({[sends, copies](Segment& s) { host::Run(s, sends); }, {}, std::make_shared<Token>()});
  }
  // For the end of the process: lets what was asked for leave it, for a while.
  void Flush(Clock::time_point deadline) {
    main.Flush(deadline);
    sender.Flush(deadline);
  }

  Segment segment;

 private:
  struct Job {
    Work work;
    Tokens before;
    std::shared_ptr<Token> token;
  };

  // Jobs in order, on a thread of their own.
  class Queue {
   public:
    explicit Queue(Segment& segment) : segment(segment), thread([this] { Run(); }) {}
    ~Queue() {
      Push({nullptr, {}, std::make_shared<Token>()});  // the end of the thread
      thread.join();
    }
    void Push(Job job) {
      {
        std::lock_guard<std::mutex> lock(mutex);
        jobs.push_back(std::move(job));
      }
      changed.notify_all();
    }
    void Flush(Clock::time_point deadline) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait_until(lock, deadline, [&] { return jobs.empty() && !running; });
    }

   private:
    void Run() {
      std::string error;  // once broken, always broken: the ranks no longer agree on where they are
      for (;;) {
        Job job;
        {
          std::unique_lock<std::mutex> lock(mutex);
          running = false;
          changed.notify_all();
          changed.wait(lock, [&] { return !jobs.empty(); });
          job = std::move(jobs.front());
          jobs.pop_front();
          running = true;
        }
        if (error.empty()) error = host::WaitAll(job.before);
        if (!job.work) return job.token->Finish(error);
        try {
          if (error.empty()) job.work(segment);
        } catch (const std::exception& failure) {
          error = failure.what();
        }
        job.token->Finish(error);
      }
    }

    Segment& segment;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    bool running = false;
    std::thread thread;
  };
  Queue main, sender;
};

namespace {
std::mutex communicators_mutex;
std::vector<Communicator*>& Communicators() {
  static auto* all = new std::vector<Communicator*>;
  return *all;
}
void FlushAll() {
  const auto deadline = Clock::now() + std::chrono::seconds(5);
  std::lock_guard<std::mutex> lock(communicators_mutex);
  for (Communicator* comm : Communicators()) comm->Flush(deadline);
}

struct Group {
  int depth = 0;
  std::vector<std::pair<Communicator*, Stream>> order;
  std::map<Communicator*, std::vector<Transfer>> transfers;
};
thread_local Group group;

void AddTransfer(Communicator* comm, Transfer transfer, Stream stream) {
  if (transfer.peer < 0 || transfer.peer >= comm->segment.size) {
    host::Fail("no rank " + std::to_string(transfer.peer) + " in a communicator of " +
               std::to_string(comm->segment.size));
  }
  GroupStart();
  auto& transfers = group.transfers[comm];
  if (transfers.empty()) group.order.emplace_back(comm, stream);
  transfers.push_back(transfer);
  GroupEnd();
}
}  // namespace

CommunicatorId NewCommunicatorId() { return host::NewId(); }

Communicator* CreateCommunicator(const CommunicatorId& id, int rank, int size) {
  auto* comm = new Communicator(host::Meet(id, size), rank, size);
  std::lock_guard<std::mutex> lock(communicators_mutex);
  if (Communicators().empty()) std::atexit(FlushAll);
  Communicators().push_back(comm);
  return comm;
}

void DestroyCommunicator(Communicator* comm) {
  {
    std::lock_guard<std::mutex> lock(communicators_mutex);
    auto& all = Communicators();
    all.erase(std::remove(all.begin(), all.end(), comm), all.end());
  }
  delete comm;
}

void AllReduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
               Stream stream) {
  Reduce(comm, in, out, count, type, reduction, -1, stream);
}
void Reduce(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction, int root,
            Stream stream) {
  comm->Enqueue([=](Segment& s) { host::Reduce(s, Bytes(in), Bytes(out), count, type, reduction, root); }, stream);
}
void ReduceScatter(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
                   Stream stream) {
  comm->Enqueue([=](Segment& s) { host::ReduceScatter(s, Bytes(in), Bytes(out), count, type, reduction); }, stream);
}
void Broadcast(Communicator* comm, void* data, size_t bytes, int root, Stream stream) {
  comm->Enqueue([=](Segment& s) { host::Broadcast(s, Bytes(data), bytes, root); }, stream);
}
void AllGather(Communicator* comm, const void* in, void* out, size_t bytes, Stream stream) {
  comm->Enqueue([=](Segment& s) { host::AllGather(s, Bytes(in), Bytes(out), bytes); }, stream);
}
void Send(Communicator* comm, const void* data, size_t bytes, int peer, Stream stream) {
  AddTransfer(comm, {true, peer, Bytes(data), bytes, 0}, stream);
}
void Receive(Communicator* comm, void* data, size_t bytes, int peer, Stream stream) {
  AddTransfer(comm, {false, peer, Bytes(data), bytes, 0}, stream);
}
void GroupStart() { ++group.depth; }
void GroupEnd() {
  if (--group.depth > 0) return;
  Group ended;
  std::swap(ended, group);
  for (auto& [comm, stream] : ended.order) {
    std::vector<Transfer> sends, receives;
    for (const Transfer& transfer : ended.transfers[comm]) (transfer.is_send ? sends : receives).push_back(transfer);
    if (!sends.empty()) comm->EnqueueSends(std::move(sends), stream);
    if (!receives.empty()) comm->Enqueue([receives](Segment& s) { host::Run(s, receives); }, stream, Kind::kReceive);
  }
}

}  // namespace nvgpu::runtime
