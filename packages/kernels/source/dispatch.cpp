#include "dispatch.h"

#include "product.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace posenc {

namespace plain {
extern const Kernels kernels;
extern const ProductKernels product_kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kernels;
extern const ProductKernels product_kernels;
}
namespace avx512 {
extern const Kernels kernels;
extern const ProductKernels product_kernels;
}
#elif defined(__aarch64__)
namespace dotprod {
extern const ProductKernels product_kernels;
}
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

// Returns numbers of a vector.
int64_t widest() {
  struct Set { const char* name; int64_t width; bool runs; };
  const Set sets[] = {{"avx512", 16, runs_avx512()}, {"avx2", 8, runs_avx2()}, {"plain", 4, true}};
  const char* asked = std::getenv("POSENC_INSTRUCTIONS");
  std::string known;
  for (const Set& set : sets) {
    if (!set.runs) continue;
    if (!asked || !*asked || !std::strcmp(asked, set.name)) return set.width;
    known += (known.empty() ? "" : ", ") + std::string(set.name);
  }
  throw std::runtime_error("POSENC_INSTRUCTIONS to name an instruction set of this processor (" +
                           known + "), got " + asked + "; unset it for the widest one");
}

}  // namespace

const Kernels& kernels_for([[maybe_unused]] int64_t size) {
  [[maybe_unused]] static const int64_t width = widest();
#if defined(__x86_64__)
  if (width == 16 && size % 16 == 0) return avx512::kernels;
  if (width >= 8 && size % 8 == 0) return avx2::kernels;
#endif
  return plain::kernels;
}

const ProductKernels& product_kernels() {
#if defined(__x86_64__)
  static const int64_t width = widest();
  if (width == 16 && __builtin_cpu_supports("avx512vnni")) return avx512::product_kernels;
  if (width >= 8) return avx2::product_kernels;
#elif defined(__aarch64__)
  constexpr unsigned long DOTPROD = 1 << 20;  // HWCAP_ASIMDDP
  const char* asked = std::getenv("POSENC_INSTRUCTIONS");
  if ((!asked || !*asked) && getauxval(AT_HWCAP) & DOTPROD) return dotprod::product_kernels;
#endif
  return plain::product_kernels;
}

}  // namespace posenc
