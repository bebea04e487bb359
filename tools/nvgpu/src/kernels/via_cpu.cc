#include "common.h"
namespace nvgpu { void RegisterViaCpu() {} }
