#include "host/rendezvous.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <map>
#include <mutex>

#include "host/errors.h"

namespace nvgpu::host {
namespace {

using runtime::CommunicatorId;

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

// The first rank: makes the file and hands it out.
int HandOut(int listener, int size) {
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

int Join(const CommunicatorId& id) {
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

}  // namespace

CommunicatorId NewId() {
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

int Meet(const CommunicatorId& id, int size) {
  int listener = -1;
  {
    std::lock_guard<std::mutex> lock(meeting_mutex);
    auto found = Listeners().find(id.bytes);
    if (found != Listeners().end()) {
      listener = found->second;
      Listeners().erase(found);
    }
  }
  return listener >= 0 ? HandOut(listener, size) : Join(id);
}

}  // namespace nvgpu::host
