// The memory that the ranks of one communicator share: an anonymous file (memfd), mapped by each of them.
//
// Every rank holds a record lock on one byte of the file; the kernel drops the lock when the process dies, and that is
// how the others notice. Waiting sleeps in a futex.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace nvgpu::host {

constexpr size_t kSlotBytes = 1 << 20;    // one rank's share of one step of a collective
constexpr size_t kMailBytes = 256 << 10;  // one piece of a send
constexpr int kMailSlots = 2;             // pieces under way between two ranks

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free);

// From one rank to another.
struct alignas(64) Mailbox {
  Word written{0}, read{0};
  uint64_t bytes[kMailSlots];
  char data[kMailSlots][kMailBytes];
};

class Segment {
 public:
  // Takes over the file's descriptor; returns when all ranks are there.
  Segment(int file, int rank, int size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  Mailbox& MailFrom(int from, int to);
  // Rung whenever another rank wrote to, or read from, one of that rank's mailboxes.
  Word& BellOf(int of) { return State(of).bell; }
  void Ring(int of);

  // Two buffers a rank, used in turn: who writes one has passed a barrier after everybody read it.
  void NextTurn() { turn_ ^= 1; }
  char* SlotOf(int of);

  // `what` is done meanwhile, for the message of a failure.
  void Barrier(const char* what);
  // Sleeps on the word until ready(); fails when a peer is dead or nothing happened for long.
  void Await(Word& word, const char* what, const std::function<bool()>& ready);

  const int rank, size;

 private:
  struct alignas(64) Head {
    Word attached{0}, inside{0}, generation{0};
  };
  struct alignas(64) RankState {
    Word bell{0};
    Word arrived{0};  // barriers that this rank has reached
  };

  Head& Shared() { return *reinterpret_cast<Head*>(base_); }
  RankState& State(int of) { return reinterpret_cast<RankState*>(base_ + sizeof(Head))[of]; }
  size_t Bytes() const;
  int DeadPeer();
  std::string Missing();

  const int file_;
  char* base_ = nullptr;
  int turn_ = 0;
};

}  // namespace nvgpu::host
