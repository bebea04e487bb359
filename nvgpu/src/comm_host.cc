// Collectives of the host runtime: processes of one machine that share one anonymous file (memfd).
//
// The file has no name, so that nothing is left behind however a process ends: the first rank creates it and hands it
// to the others over an abstract Unix socket whose name is the communicator's id. Every rank holds a record lock on one
// byte of it; the kernel drops the lock when the process dies, and that is how the others notice. Waiting sleeps in a
// futex.
//
// Each communicator runs its operations in the order of the calls, on a thread of its own; sends have a second one, and
// sends and receives do not wait for each other: as if each pair of ranks had a communicator, which is how Paddle uses
// NCCL. Its interleaved pipeline asks for a receive before the send that its peers need to answer it.
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "host_stream.h"
#include "math/types.h"
#include "runtime.h"

namespace nvgpu::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using host::Kind;
using host::Token;
using host::Tokens;

constexpr size_t kSlotBytes = 1 << 20;    // one rank's share of one step of a collective
constexpr size_t kMailBytes = 256 << 10;  // one piece of a send
constexpr int kMailSlots = 2;             // pieces under way between two ranks
constexpr auto kCheckEvery = std::chrono::milliseconds(500);

[[noreturn]] void Fail(const std::string& what) { throw std::runtime_error("nvgpu (host): " + what); }
[[noreturn]] void FailErrno(const std::string& what) { Fail(what + ": " + std::strerror(errno)); }

// Seconds after which a collective gives up on peers that live but do not answer.
Clock::duration Timeout() {
  const char* seconds = std::getenv("NVGPU_TIMEOUT");
  return std::chrono::seconds(seconds == nullptr ? 600 : std::atoi(seconds));
}

// ---------------------------------------------------------------- the shared file

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free);

struct alignas(64) Mailbox {
  Word written{0}, read{0};
  uint64_t bytes[kMailSlots];
  char data[kMailSlots][kMailBytes];
};
struct alignas(64) RankState {
  Word bell{0};     // rung whenever another rank wrote to, or read from, one of this rank's mailboxes
  Word arrived{0};  // barriers that this rank has reached
};
struct alignas(64) Head {
  Word attached{0}, inside{0}, generation{0};
};

void Wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
void Sleep(Word& word, uint32_t seen) {
  timespec limit{0, std::chrono::nanoseconds(kCheckEvery).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

struct Segment {
  Segment(int file, int rank, int size) : file(file), rank(rank), size(size) {
    if (ftruncate(file, Bytes()) != 0) FailErrno("cannot size the shared memory");
    void* memory = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (memory == MAP_FAILED) FailErrno("cannot map the shared memory");
    base = static_cast<char*>(memory);
    struct flock lock = ByteOf(rank);
    if (fcntl(file, F_SETLK, &lock) != 0) FailErrno("cannot lock the shared memory");
    head().attached.fetch_add(1);
    Wake(head().attached);
    Await(head().attached, "joining", [&] { return head().attached.load() >= static_cast<uint32_t>(size); });
  }
  ~Segment() {
    munmap(base, Bytes());
    close(file);
  }

  Head& head() { return *reinterpret_cast<Head*>(base); }
  RankState& state(int of) { return reinterpret_cast<RankState*>(base + sizeof(Head))[of]; }
  Mailbox& mail(int from, int to) {
    return reinterpret_cast<Mailbox*>(base + sizeof(Head) + size * sizeof(RankState))[from * size + to];
  }
  // Two buffers a rank, used in turn: who writes one has passed a barrier after everybody read it.
  char* slot(int of, int turn) { return base + Bytes() - (size_t(size - of) * 2 - turn) * kSlotBytes; }

  // Sleeps on the word until ready(); fails when a peer is dead or nothing happened for long.
  template <typename Ready>
  void Await(Word& word, const char* what, Ready ready) {
    const auto deadline = Clock::now() + Timeout();
    auto next_check = Clock::now() + kCheckEvery;
    for (;;) {
      uint32_t seen = word.load();
      if (ready()) return;
      Sleep(word, seen);
      if (Clock::now() < next_check) continue;
      next_check = Clock::now() + kCheckEvery;
      const int dead = DeadPeer();
      if (ready()) return;  // a peer may end right after its last word
      if (dead >= 0) Fail("rank " + std::to_string(dead) + " of " + std::to_string(size) + " ended during " + what);
      if (Clock::now() > deadline) Fail(std::string("no answer within NVGPU_TIMEOUT during ") + what + Missing());
    }
  }

  void Barrier(const char* what) {
    const uint32_t now = head().generation.load();
    state(rank).arrived.fetch_add(1);
    if (head().inside.fetch_add(1) + 1 == static_cast<uint32_t>(size)) {
      head().inside.store(0);
      head().generation.fetch_add(1);
      Wake(head().generation);
    } else {
      Await(head().generation, what, [&] { return head().generation.load() != now; });
    }
  }

  void Ring(int of) {
    state(of).bell.fetch_add(1);
    Wake(state(of).bell);
  }

  const int file, rank, size;
  char* base = nullptr;
  int turn = 0;

 private:
  size_t Bytes() const {
    size_t bytes = sizeof(Head) + size * sizeof(RankState) + size_t(size) * size * sizeof(Mailbox);
    bytes = (bytes + 4095) / 4096 * 4096;
    return bytes + 2 * size_t(size) * kSlotBytes;
  }
  static struct flock ByteOf(int rank) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
  }
  int DeadPeer() {
    if (head().attached.load() < static_cast<uint32_t>(size)) return -1;  // some have not come yet
    for (int peer = 0; peer < size; ++peer) {
      struct flock lock = ByteOf(peer);
      if (peer != rank && fcntl(file, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) return peer;
    }
    return -1;
  }
  std::string Missing() {
    std::string text = "; collectives reached so far:";
    for (int i = 0; i < size; ++i) {
      text += " rank " + std::to_string(i) + " " + std::to_string(state(i).arrived.load());
    }
    return text;
  }
};

// ---------------------------------------------------------------- meeting

sockaddr_un AddressOf(const CommunicatorId& id, socklen_t* length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;  // a first byte of zero: the abstract namespace, with no file behind it
  const size_t size = strnlen(id.bytes, sizeof(id.bytes));
  std::memcpy(address.sun_path + 1, id.bytes, std::min(size, sizeof(address.sun_path) - 1));
  *length = offsetof(sockaddr_un, sun_path) + 1 + size;
  return address;
}

std::mutex meeting_mutex;
std::map<std::string, int>& Listeners() {  // of the ids that this process made
  static auto* listeners = new std::map<std::string, int>;
  return *listeners;
}

void WaitReadable(int socket, const char* what) {
  pollfd entry{socket, POLLIN, 0};
  const int limit = std::chrono::duration_cast<std::chrono::milliseconds>(Timeout()).count();
  const int ready = poll(&entry, 1, limit);
  if (ready < 0 && errno == EINTR) return WaitReadable(socket, what);
  if (ready <= 0) Fail(std::string("no answer within NVGPU_TIMEOUT while ") + what);
}

// One byte with the file's descriptor attached.
struct Envelope {
  Envelope() {
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
  char byte = 0;
  iovec vector{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
};

void SendFile(int socket, int file) {
  Envelope envelope;
  cmsghdr* part = CMSG_FIRSTHDR(&envelope.message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(part), &file, sizeof(int));
  if (sendmsg(socket, &envelope.message, MSG_NOSIGNAL) < 0) FailErrno("cannot hand over the shared memory");
}

int ReceiveFile(int socket) {
  Envelope envelope;
  WaitReadable(socket, "joining a communicator");
  if (recvmsg(socket, &envelope.message, MSG_CMSG_CLOEXEC) <= 0) Fail("the first rank ended while others joined it");
  cmsghdr* part = CMSG_FIRSTHDR(&envelope.message);
  if (part == nullptr) Fail("the first rank sent no shared memory");
  int file;
  std::memcpy(&file, CMSG_DATA(part), sizeof(int));
  return file;
}

int HostMeeting(int listener, int size) {
  const int file = memfd_create("nvgpu", MFD_CLOEXEC);
  if (file < 0) FailErrno("cannot create shared memory");
  for (int joined = 1; joined < size; ++joined) {
    WaitReadable(listener, "waiting for the other ranks to join");
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) FailErrno("cannot accept a rank");
    SendFile(socket, file);
    close(socket);
  }
  close(listener);
  return file;
}

int JoinMeeting(const CommunicatorId& id) {
  socklen_t length;
  const sockaddr_un address = AddressOf(id, &length);
  const int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(socket, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    FailErrno("cannot reach the communicator's first rank (it must run on this machine)");
  }
  const int file = ReceiveFile(socket);
  close(socket);
  return file;
}

// ---------------------------------------------------------------- arithmetic

template <typename T, typename Sum, typename Combine>
void Fold(char* out, char* const* parts, int ranks, size_t count, Combine combine, bool average) {
  for (size_t i = 0; i < count; ++i) {
    Sum sum = static_cast<Sum>(reinterpret_cast<const T*>(parts[0])[i]);
    for (int r = 1; r < ranks; ++r) sum = combine(sum, static_cast<Sum>(reinterpret_cast<const T*>(parts[r])[i]));
    if (average) sum = sum / static_cast<Sum>(ranks);
    reinterpret_cast<T*>(out)[i] = static_cast<T>(sum);
  }
}

template <typename T, typename Sum>
void FoldAs(char* out, char* const* parts, int ranks, size_t count, Reduction reduction) {
  switch (reduction) {
    case Reduction::kMax:
      return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a > b ? a : b; }, false);
    case Reduction::kMin:
      return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a < b ? a : b; }, false);
    case Reduction::kProduct: return Fold<T, Sum>(out, parts, ranks, count, [](Sum a, Sum b) { return a * b; }, false);
    default:
      return Fold<T, Sum>(
          out, parts, ranks, count, [](Sum a, Sum b) { return a + b; }, reduction == Reduction::kAverage);
  }
}

// In the order of the ranks, so that every rank gets the same bits; 16-bit floats are added in float32.
void FoldRanks(char* out, char* const* parts, int ranks, size_t count, Type type, Reduction reduction) {
  switch (type) {
    case Type::kBool:
    case Type::kUint8: return FoldAs<uint8_t, uint8_t>(out, parts, ranks, count, reduction);
    case Type::kInt8: return FoldAs<int8_t, int8_t>(out, parts, ranks, count, reduction);
    case Type::kInt16: return FoldAs<int16_t, int16_t>(out, parts, ranks, count, reduction);
    case Type::kInt32: return FoldAs<int32_t, int32_t>(out, parts, ranks, count, reduction);
    case Type::kInt64: return FoldAs<int64_t, int64_t>(out, parts, ranks, count, reduction);
    case Type::kHalf: return FoldAs<math::half, float>(out, parts, ranks, count, reduction);
    case Type::kBfloat16: return FoldAs<math::bfloat16, float>(out, parts, ranks, count, reduction);
    case Type::kFloat: return FoldAs<float, float>(out, parts, ranks, count, reduction);
    case Type::kDouble: return FoldAs<double, double>(out, parts, ranks, count, reduction);
    case Type::kNone: Fail("this element type cannot be reduced");
  }
}

// ---------------------------------------------------------------- the algorithms, on the communicator's thread

char* Bytes(const void* pointer) { return static_cast<char*>(const_cast<void*>(pointer)); }

// One step of a collective: everyone who has something writes it to its slot; after the barrier all may read all slots.
template <typename Write, typename Read>
void Step(Segment& segment, const char* what, Write write, Read read) {
  segment.turn ^= 1;
  write(segment.slot(segment.rank, segment.turn));
  segment.Barrier(what);
  std::vector<char*> slots(segment.size);
  for (int r = 0; r < segment.size; ++r) slots[r] = segment.slot(r, segment.turn);
  read(slots.data());
}

void RunReduce(Segment& segment, const char* in, char* out, size_t count, Type type, Reduction reduction, int root) {
  const size_t piece = kSlotBytes / SizeOf(type), width = SizeOf(type);
  for (size_t at = 0; at < count; at += piece) {
    const size_t n = std::min(piece, count - at);
    Step(
        segment, "all-reduce", [&](char* mine) { std::memcpy(mine, in + at * width, n * width); },
        [&](char** slots) {
          if (root >= 0 && root != segment.rank) return;
          FoldRanks(out + at * width, slots, segment.size, n, type, reduction);
        });
  }
}

void RunReduceScatter(Segment& segment, const char* in, char* out, size_t count, Type type, Reduction reduction) {
  const size_t width = SizeOf(type), piece = kSlotBytes / width / segment.size;
  for (size_t at = 0; at < count; at += piece) {
    const size_t n = std::min(piece, count - at);
    Step(
        segment, "reduce-scatter",
        [&](char* mine) {
          for (int r = 0; r < segment.size; ++r) {
            std::memcpy(mine + r * n * width, in + (r * count + at) * width, n * width);
          }
        },
        [&](char** slots) {
          for (int r = 0; r < segment.size; ++r) slots[r] += segment.rank * n * width;
          FoldRanks(out + at * width, slots, segment.size, n, type, reduction);
        });
  }
}

void RunBroadcast(Segment& segment, char* data, size_t bytes, int root) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t n = std::min(kSlotBytes, bytes - at);
    Step(
        segment, "broadcast",
        [&](char* mine) {
          if (segment.rank == root) std::memcpy(mine, data + at, n);
        },
        [&](char** slots) {
          if (segment.rank != root) std::memcpy(data + at, slots[root], n);
        });
  }
}

void RunAllGather(Segment& segment, const char* in, char* out, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t n = std::min(kSlotBytes, bytes - at);
    Step(
        segment, "all-gather", [&](char* mine) { std::memcpy(mine, in + at, n); },
        [&](char** slots) {
          for (int r = 0; r < segment.size; ++r) std::memcpy(out + r * bytes + at, slots[r], n);
        });
  }
}

struct Transfer {
  bool is_send;
  int peer;
  char* data;
  size_t bytes, done;
};

// Moves one piece if the mailbox allows it.
bool Advance(Segment& segment, Transfer& transfer) {
  Mailbox& box =
      transfer.is_send ? segment.mail(segment.rank, transfer.peer) : segment.mail(transfer.peer, segment.rank);
  const size_t n = std::min(kMailBytes, transfer.bytes - transfer.done);
  const uint32_t written = box.written.load(), read = box.read.load();
  char* data = transfer.data + transfer.done;
  if (transfer.is_send) {
    if (written - read == kMailSlots) return false;
    std::memcpy(box.data[written % kMailSlots], data, n);
    box.bytes[written % kMailSlots] = n;
    box.written.store(written + 1);
  } else {
    if (written == read) return false;
    if (box.bytes[read % kMailSlots] != n) {
      Fail("rank " + std::to_string(segment.rank) + " expects " + std::to_string(transfer.bytes) + " bytes from rank " +
           std::to_string(transfer.peer) + ", which sent another number");
    }
    std::memcpy(data, box.data[read % kMailSlots], n);
    box.read.store(read + 1);
  }
  transfer.done += n;
  segment.Ring(transfer.peer);
  return true;
}

// All transfers at once; those between the same two ranks in the same direction keep their order.
void RunTransfers(Segment& segment, std::vector<Transfer> transfers) {
  for (;;) {
    const uint32_t seen = segment.state(segment.rank).bell.load();
    bool moved = false, finished = true;
    std::vector<char> busy(2 * segment.size, 0);
    for (Transfer& transfer : transfers) {
      if (transfer.done == transfer.bytes) continue;
      finished = false;
      char& in_use = busy[2 * transfer.peer + transfer.is_send];
      if (in_use) continue;
      in_use = 1;
      moved |= Advance(segment, transfer);
    }
    if (finished) return;
    if (moved) continue;
    Word& bell = segment.state(segment.rank).bell;
    segment.Await(bell, "send or receive", [&] { return bell.load() != seen; });
  }
}

}  // namespace

// ---------------------------------------------------------------- the communicator

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
    sender.Push({[sends, copies](Segment& s) { RunTransfers(s, sends); }, {}, std::make_shared<Token>()});
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
    Fail("no rank " + std::to_string(transfer.peer) + " in a communicator of " + std::to_string(comm->segment.size));
  }
  GroupStart();
  auto& transfers = group.transfers[comm];
  if (transfers.empty()) group.order.emplace_back(comm, stream);
  transfers.push_back(transfer);
  GroupEnd();
}
}  // namespace

CommunicatorId NewCommunicatorId() {
  CommunicatorId id = {};
  unsigned long long random[2];
  if (getrandom(random, sizeof(random), 0) != sizeof(random)) FailErrno("no random numbers");
  std::snprintf(id.bytes, sizeof(id.bytes), "nvgpu-%016llx%016llx", random[0], random[1]);
  socklen_t length;
  const sockaddr_un address = AddressOf(id, &length);
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || bind(listener, reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener, SOMAXCONN) != 0) {
    FailErrno("cannot open a socket for the other ranks");
  }
  std::lock_guard<std::mutex> lock(meeting_mutex);
  Listeners()[id.bytes] = listener;
  return id;
}

Communicator* CreateCommunicator(const CommunicatorId& id, int rank, int size) {
  int listener = -1;
  {
    std::lock_guard<std::mutex> lock(meeting_mutex);
    auto found = Listeners().find(id.bytes);
    if (found != Listeners().end()) {
      listener = found->second;
      Listeners().erase(found);
    }
  }
  auto* comm = new Communicator(listener >= 0 ? HostMeeting(listener, size) : JoinMeeting(id), rank, size);
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
  comm->Enqueue([=](Segment& s) { RunReduce(s, Bytes(in), Bytes(out), count, type, reduction, root); }, stream);
}
void ReduceScatter(Communicator* comm, const void* in, void* out, size_t count, Type type, Reduction reduction,
                   Stream stream) {
  comm->Enqueue([=](Segment& s) { RunReduceScatter(s, Bytes(in), Bytes(out), count, type, reduction); }, stream);
}
void Broadcast(Communicator* comm, void* data, size_t bytes, int root, Stream stream) {
  comm->Enqueue([=](Segment& s) { RunBroadcast(s, Bytes(data), bytes, root); }, stream);
}
void AllGather(Communicator* comm, const void* in, void* out, size_t bytes, Stream stream) {
  comm->Enqueue([=](Segment& s) { RunAllGather(s, Bytes(in), Bytes(out), bytes); }, stream);
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
    if (!receives.empty()) comm->Enqueue([receives](Segment& s) { RunTransfers(s, receives); }, stream, Kind::kReceive);
  }
}

}  // namespace nvgpu::runtime
