// CUDA's libraries, found when they are needed. Two copies of one in a process fail in silence (kernels that do not
// run), so: what the process already has; else the folders of PADDLE_TE_CUDA_LIBRARIES, the user's choice; else
// NVIDIA's pip packages beside Paddle; else where the system looks. paddle_te/native/library.py keeps the same order.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>

namespace nvgpu {

// The directory of libphi_core.so in this process: .../site-packages/paddle/libs/.
inline std::string PaddleLibs() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* result) {
        const char* end = std::strstr(info->dlpi_name, "libphi_core.so");
        if (end == nullptr) return 0;
        *static_cast<std::string*>(result) = std::string(info->dlpi_name, end - info->dlpi_name);
        return 1;
      },
      &found);
  return found;
}

// The library in the first chosen folder that has it, or null.
inline void* OpenChosen(const std::string& soname) {
  const char* folders = std::getenv("PADDLE_TE_CUDA_LIBRARIES");
  std::istringstream list(folders ? folders : "");
  for (std::string folder; std::getline(list, folder, ':');) {
    const std::string path = folder + "/" + soname;
    if (folder.empty()) continue;
    if (void* chosen = dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return chosen;
  }
  return nullptr;
}

inline void* OpenLibrary(const std::string& soname) {
  if (void* here = dlopen(soname.c_str(), RTLD_LAZY | RTLD_NOLOAD)) return here;
  if (void* chosen = OpenChosen(soname)) return chosen;
  for (const char* package : {"cu13", "cuda_runtime", "cublas", "nccl"}) {
    const std::string path = PaddleLibs() + "../../nvidia/" + package + "/lib/" + soname;
    if (void* packaged = dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return packaged;
  }
  if (void* installed = dlopen(soname.c_str(), RTLD_LAZY | RTLD_GLOBAL)) return installed;
  throw std::runtime_error(
      "nvgpu: " + std::string(dlerror()) +
      " (looked in this process, in PADDLE_TE_CUDA_LIBRARIES, in the nvidia pip packages and on the library path)");
}

template <typename Function>
void Find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  if (*function == nullptr) throw std::runtime_error("nvgpu: " + std::string(dlerror()));
}

}  // namespace nvgpu
