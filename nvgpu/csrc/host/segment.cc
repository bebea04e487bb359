#include "host/segment.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

#include "host/errors.h"

namespace nvgpu::host {
namespace {

constexpr auto kCheckEvery = std::chrono::milliseconds(500);

void Wake(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }
void Sleep(Word& word, uint32_t seen) {
  timespec limit{0, std::chrono::nanoseconds(kCheckEvery).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

struct flock ByteOf(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment::Segment(int file, int rank, int size) : rank(rank), size(size), file_(file) {
  if (ftruncate(file, Bytes()) != 0) FailErrno("cannot size the shared memory");
  void* memory = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (memory == MAP_FAILED) FailErrno("cannot map the shared memory");
  base_ = static_cast<char*>(memory);
  struct flock lock = ByteOf(rank);
  if (fcntl(file, F_SETLK, &lock) != 0) FailErrno("cannot lock the shared memory");
  Word& attached = Shared().attached;
  attached.fetch_add(1);
  Wake(attached);
  Await(attached, "joining", [&] { return attached.load() >= static_cast<uint32_t>(size); });
}

Segment::~Segment() {
  munmap(base_, Bytes());
  close(file_);
}

// The file: Head, a RankState a rank, a Mailbox a pair of ranks, to the end of the page; then two slots a rank.
size_t Segment::Bytes() const {
  size_t bytes = sizeof(Head) + size * sizeof(RankState) + size_t(size) * size * sizeof(Mailbox);
  bytes = (bytes + 4095) / 4096 * 4096;
  return bytes + 2 * size_t(size) * kSlotBytes;
}
Mailbox& Segment::MailFrom(int from, int to) {
  return reinterpret_cast<Mailbox*>(base_ + sizeof(Head) + size * sizeof(RankState))[from * size + to];
}
char* Segment::SlotOf(int of) { return base_ + Bytes() - (size_t(size - of) * 2 - turn_) * kSlotBytes; }

void Segment::Ring(int of) {
  BellOf(of).fetch_add(1);
  Wake(BellOf(of));
}

void Segment::Barrier(const char* what) {
  Head& head = Shared();
  const uint32_t now = head.generation.load();
  State(rank).arrived.fetch_add(1);
  if (head.inside.fetch_add(1) + 1 == static_cast<uint32_t>(size)) {
    head.inside.store(0);
    head.generation.fetch_add(1);
    Wake(head.generation);
  } else {
    Await(head.generation, what, [&] { return head.generation.load() != now; });
  }
}

void Segment::Await(Word& word, const char* what, const std::function<bool()>& ready) {
  const auto deadline = Clock::now() + Timeout();
  auto next_check = Clock::now() + kCheckEvery;
  for (;;) {
    const uint32_t seen = word.load();
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

int Segment::DeadPeer() {
  if (Shared().attached.load() < static_cast<uint32_t>(size)) return -1;  // some have not come yet
  for (int peer = 0; peer < size; ++peer) {
    struct flock lock = ByteOf(peer);
    if (peer != rank && fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) return peer;
  }
  return -1;
}

std::string Segment::Missing() {
  std::string text = "; collectives reached so far:";
  for (int i = 0; i < size; ++i) text += " rank " + std::to_string(i) + " " + std::to_string(State(i).arrived.load());
  return text;
}

}  // namespace nvgpu::host
