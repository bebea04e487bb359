#include "host/transfers.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "host/errors.h"

namespace nvgpu::host {
namespace {

// Moves one piece if the mailbox allows it.
bool Advance(Segment& segment, Transfer& transfer) {
  Mailbox& box =
      transfer.is_send ? segment.MailFrom(segment.rank, transfer.peer) : segment.MailFrom(transfer.peer, segment.rank);
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

}  // namespace

void Run(Segment& segment, std::vector<Transfer> transfers) {
  for (;;) {
    const uint32_t seen = segment.BellOf(segment.rank).load();
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
    Word& bell = segment.BellOf(segment.rank);
    segment.Await(bell, "send or receive", [&] { return bell.load() != seen; });
  }
}

}  // namespace nvgpu::host
