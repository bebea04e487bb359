// The collectives of a communicator's ranks. Each runs on the communicator's thread and returns when this rank is done.
#pragma once

#include <cstddef>

#include "host/segment.h"
#include "runtime.h"

namespace nvgpu::host {

// Counts are in elements of `type`, of one rank's share in ReduceScatter; bytes are of one rank's share in AllGather.
// root: the rank that gets the result; -1 for all.
void Reduce(Segment& segment, const char* in, char* out, size_t count, Type type, runtime::Reduction reduction,
            int root);
void ReduceScatter(Segment& segment, const char* in, char* out, size_t count, Type type, runtime::Reduction reduction);
void Broadcast(Segment& segment, char* data, size_t bytes, int root);
void AllGather(Segment& segment, const char* in, char* out, size_t bytes);

}  // namespace nvgpu::host
