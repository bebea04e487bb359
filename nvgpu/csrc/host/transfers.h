// Sends and receives between two ranks, through a mailbox for each direction.
#pragma once

#include <cstddef>
#include <vector>

#include "host/segment.h"

namespace nvgpu::host {

struct Transfer {
  bool is_send;
  int peer;
  char* data;
  size_t bytes, done;
};

// All transfers at once; those between the same two ranks in the same direction keep their order.
void Run(Segment& segment, std::vector<Transfer> transfers);

}  // namespace nvgpu::host
