// Streams of the host runtime. Kernels and copies run at once, in the thread that calls them; only collectives run
// elsewhere, on a thread of their communicator, because they wait for other processes. A stream is therefore no more
// than the list of collectives that its next operation must wait for.
#pragma once

#include <algorithm>
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
  bool HasSucceeded() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ && error_.empty();
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

// Sends wait for no receive that was asked for on the same stream; everything else keeps its order.
enum class Kind { kOther, kReceive };

class HostStream {
 public:
  Tokens Pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return All();
  }
  // What an event stands for.
  void Add(const Tokens& tokens) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& token : tokens) pending_.push_back({token, Kind::kOther});
  }
  // What a send waits for.
  Tokens Others() {
    std::lock_guard<std::mutex> lock(mutex_);
    Tokens others;
    for (const auto& entry : pending_) {
      if (entry.kind == Kind::kOther) others.push_back(entry.token);
    }
    return others;
  }
  // The stream's next collective or receive, which stands for all before it; returns those.
  Tokens Append(std::shared_ptr<Token> token, Kind kind) {
    std::lock_guard<std::mutex> lock(mutex_);
    Prune();
    Tokens before = All();
    if (kind == Kind::kOther) pending_.clear();
    pending_.push_back({std::move(token), kind});
    return before;
  }
  // What is waited for stays pending until it is over: other threads, such as a data loader's, come here too. What
  // failed stays for good.
  void Drain() {
    WaitOrThrow(Pending());
    std::lock_guard<std::mutex> lock(mutex_);
    Prune();
  }

 private:
  struct Entry {
    std::shared_ptr<Token> token;
    Kind kind;
  };
  void Prune() {
    const auto over = [](const Entry& entry) { return entry.token->HasSucceeded(); };
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), over), pending_.end());
  }
  Tokens All() const {
    Tokens tokens;
    for (const Entry& entry : pending_) tokens.push_back(entry.token);
    return tokens;
  }

  std::mutex mutex_;
  std::vector<Entry> pending_;
};

HostStream& Of(void* stream);  // the null stream has an object of its own

}  // namespace nvgpu::host
