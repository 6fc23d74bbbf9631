#include "dispatch.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace posenc {

namespace plain { extern const Kernels kernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

namespace {

bool runs_avx2() {
#if defined(__x86_64__)
  unsigned a, b, c = 0, d;
  const bool converts = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);  // float16
  return converts && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool runs_avx512() {
#if defined(__x86_64__)
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

int64_t widest() {
  const char* limit = std::getenv("POSENC_INSTRUCTIONS");
  const bool plain = limit && !std::strcmp(limit, "plain");
  const bool avx2 = limit && !std::strcmp(limit, "avx2");
  if (runs_avx512() && !plain && !avx2) return 16;
  return runs_avx2() && !plain ? 8 : 4;
}

}  // namespace

const Kernels& kernels_for(int64_t size) {
  static const int64_t width = widest();
#if defined(__x86_64__)
  if (width == 16 && size % 16 == 0) return avx512::kernels;
  if (width >= 8 && size % 8 == 0) return avx2::kernels;
#endif
  return plain::kernels;
}

}  // namespace posenc
