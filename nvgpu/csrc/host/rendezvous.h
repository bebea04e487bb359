// How the ranks of a communicator find each other: the process that made the id creates the file that they share and
// hands its descriptor to the others, over an abstract Unix socket whose name is the id. The file has no name, so that
// nothing is left behind however a process ends.
#pragma once

#include "runtime.h"

namespace nvgpu::host {

// An id, and the socket on which this process will wait for the others.
runtime::CommunicatorId NewId();
// The descriptor of the file, empty at first, that all `size` ranks share.
int Meet(const runtime::CommunicatorId& id, int size);

}  // namespace nvgpu::host
