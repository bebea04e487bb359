// Streams of the host runtime. Kernels and copies run at once, in the thread that calls them; only collectives run
// elsewhere, on a thread of their communicator, because they wait for other processes. A stream is therefore no more
// than the list of collectives that its next operation must wait for.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace nvgpu::host {

// The end of one collective.
class Token {
 public:
  explicit Token(bool is_receive = false) : is_receive(is_receive) {}
  const bool is_receive;  // of receives only
  void Finish(std::string error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
      error_ = std::move(error);
    }
    changed_.notify_all();
  }
  bool IsDone() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  std::string Wait() {  // the error, empty where there was none
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    return error_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::string error_;
};

using Tokens = std::vector<std::shared_ptr<Token>>;

inline bool AllDone(const Tokens& tokens) {
  for (const auto& token : tokens) {
    if (!token->IsDone()) return false;
  }
  return true;
}

inline std::string WaitAll(const Tokens& tokens) {
  std::string first;
  for (const auto& token : tokens) {
    std::string error = token->Wait();
    if (first.empty()) first = std::move(error);
  }
  return first;
}

inline void WaitOrThrow(const Tokens& tokens) {
  std::string error = WaitAll(tokens);
  if (!error.empty()) throw std::runtime_error(error);
}

class HostStream {
 public:
  Tokens Pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pending_;
  }
  void Add(const Tokens& tokens) {
    std::lock_guard<std::mutex> lock(mutex_);
    pending_.insert(pending_.end(), tokens.begin(), tokens.end());
  }
  // The stream's next collective takes the place of all before it, which it waits for itself.
  Tokens Replace(std::shared_ptr<Token> token) {
    std::lock_guard<std::mutex> lock(mutex_);
    Tokens before = std::move(pending_);
    pending_ = {std::move(token)};
    return before;
  }
  void Drain() {
    Tokens tokens;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tokens.swap(pending_);
    }
    WaitOrThrow(tokens);
  }

 private:
  std::mutex mutex_;
  Tokens pending_;
};

HostStream& Of(void* stream);  // the null stream has an object of its own

}  // namespace nvgpu::host
