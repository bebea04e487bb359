// libnvgpu.so: what Paddle finds in CUSTOM_DEVICE_ROOT. It refuses every Paddle but the one that the plug-in was built
// for, and only then loads the plug-in itself, which is full of that Paddle's symbols and structures. This file uses
// none.
#include <dlfcn.h>

#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>

#include "libraries.h"

namespace {

// full_version and commit as in paddle/version/__init__.py: "3.3.1 (7688495)".
std::string PaddleVersion() {
  std::ifstream file(nvgpu::PaddleLibs() + "../version/__init__.py");
  std::string line, version = "unknown", commit;
  const auto quoted = [&] {
    const size_t first = line.find('\''), last = line.rfind('\'');
    return first == last ? std::string() : line.substr(first + 1, last - first - 1);
  };
  while (std::getline(file, line)) {
    if (line.rfind("full_version", 0) == 0 && version == "unknown") version = quoted();
    if (line.rfind("commit", 0) == 0 && commit.empty()) commit = quoted();
  }
  return version + " (" + commit + ")";
}

[[noreturn]] void Refuse(const std::string& why) {
  throw std::runtime_error("the nvgpu plug-in of CUSTOM_DEVICE_ROOT cannot be used: " + why);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void InitPlugin(void* params) {
  const std::string version = PaddleVersion();
  if (version != NVGPU_PADDLE_VERSION) {
    Refuse("it was built for Paddle " NVGPU_PADDLE_VERSION ", this is Paddle " + version +
           ". Build it again with this Python: pip install ./nvgpu, or python nvgpu/build.py --runtime " NVGPU_RUNTIME);
  }
  if (std::strcmp(NVGPU_RUNTIME, "cuda") == 0) nvgpu::OpenLibrary("libcudart.so.13");
  Dl_info self;
  dladdr(reinterpret_cast<void*>(&InitPlugin), &self);
  std::string path(self.dli_fname);
  path = path.substr(0, path.rfind('/') + 1) + "plugin/libnvgpu_" NVGPU_RUNTIME ".so";
  // Never closed: Paddle still calls in while the process exits.
  void* plugin = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) Refuse(dlerror());
  reinterpret_cast<void (*)(void*)>(dlsym(plugin, "NvgpuInitPlugin"))(params);
}
