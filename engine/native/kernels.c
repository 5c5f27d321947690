/* The kernels for each set of instructions, and which of them run.

   vectors.h, product.h and attention.h are included once for each set, with these macros:

       TARGET          the function attribute that lets the compiler use the instructions
       NAME(x)         x with the set's suffix
       LANES           floats of a register
       FMA(a, b, c)    a * b + c
       MULTIPLY_ADD(sums, weights, word)  adds to LANES int32 the products of two int16 numbers of x with
                       two of each of LANES columns or, with PLANES, of four int8 with four
       SUMS            how many sums of them are added up at the end
       MULTIPLY_BYTES(sums, few, word)  adds the products of four uint8, at most 7, of each of LANES
                       columns with four int8 numbers of x; at most DEPTH / 4 times
       WIDE_SUMS(sums) such sums as LANES int32, where they have fewer bits
       WEIGHT_OFFSET   how much larger than a weight the number is that is multiplied
       LOAD_HALVES     LANES fp16 in memory as floats
       LOWER(a, b), HIGHER(a, b)  a < b ? a : b and a > b ? a : b, where there are instructions for it

   A kernel computes a token by the same sums in the same order whatever is computed beside it. So the
   library is compiled with -ffp-contract=off, and FMA is the only fused operation. */

#define _GNU_SOURCE /* syscall */
#include "kernels.h"

#include <math.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#if __GNUC__ >= 11
#define HAS_AMX /* older compilers lack it */
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* Prefetch distances in bytes, because hardware prefetchers stop at the end of a page. On an AMD EPYC
   2048 instead of 6144 is 7% slower at one row, and 8192 is 2% slower at eight rows. */
#define TILE_PREFETCH 6144
#define KV_PREFETCH 1024
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

/* Plain C, for any processor. */
#define TARGET
#define NAME(x) x##_plain
#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))
#define WEIGHT_OFFSET 128
#define SUMS 1
#define MULTIPLY_ADD(sums, weights, word) ((sums) + multiply_pairs(weights, (word) - (ints){0}))
#define MULTIPLY_BYTES(sums, few, word)                                                  \
  ((sums) + multiply_pairs((few) & 0x00ff00ff, bytes_of(word) - (ints){0}) +           \
   multiply_pairs((few) >> 8 & 0x00ff00ff, bytes_of((word) >> 8) - (ints){0}))
typedef int16_t shorts_plain __attribute__((vector_size(16)));
typedef int32_t ints_of_pairs __attribute__((vector_size(16)));
typedef uint32_t sums_of_pairs __attribute__((vector_size(16)));
static inline sums_of_pairs multiply_pairs(ints_of_pairs a, ints_of_pairs b) {
#if defined(__x86_64__)
  return (sums_of_pairs)__builtin_ia32_pmaddwd128((shorts_plain)a, (shorts_plain)b);
#else
  return (sums_of_pairs)((a >> 16) * (b >> 16) + (a << 16 >> 16) * (b << 16 >> 16));
#endif
}
/* The bytes at even places of a word as two int16. */
static inline int32_t bytes_of(int32_t word) {
  const int16_t two[] = {(int8_t)word, (int8_t)(word >> 16)};
  int32_t both;
  memcpy(&both, two, sizeof both);
  return both;
}
#define PLAIN_HALVES
#include "vectors.h"
#include "product.h"
#include "attention.h"
#include "undefine.h"

#if defined(__x86_64__)

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(x) x##_avx2
#define LANES 8
#define FMA(a, b, c) ((floats_avx2)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define WEIGHT_OFFSET 128
#define SUMS 1 /* of sixteen registers */
#define MULTIPLY_ADD(sums, weights, word)        \
  ((uints_avx2)_mm256_add_epi32((__m256i)(sums), \
                                _mm256_madd_epi16((__m256i)(weights), _mm256_set1_epi32(word))))
#define MULTIPLY_BYTES(sums, few, word)        \
  ((uints_avx2)_mm256_add_epi16((__m256i)(sums), \
                                _mm256_maddubs_epi16((__m256i)(few), _mm256_set1_epi32(word))))
#define WIDE_SUMS(sums) ((uints_avx2)_mm256_madd_epi16((__m256i)(sums), _mm256_set1_epi16(1)))
#define LOAD_HALVES(halves) \
  ((floats_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves))))
#define LOWER(a, b) ((floats_avx2)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define HIGHER(a, b) ((floats_avx2)_mm256_max_ps((__m256)(a), (__m256)(b)))
#include "vectors.h"
#include "product.h"
#include "attention.h"
#include "undefine.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define NAME(x) x##_vnni
#define LANES 16
#define FMA(a, b, c) ((floats_vnni)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define WEIGHT_OFFSET 128
#define SUMS 2 /* each addition to a single one would wait for the one before */
#define MULTIPLY_ADD(sums, weights, word)                                  \
  ((uints_vnni)_mm512_dpwssd_epi32((__m512i)(sums), (__m512i)(weights), \
                                   _mm512_set1_epi32(word)))
#define MULTIPLY_BYTES(sums, few, word)                                \
  ((uints_vnni)_mm512_dpbusd_epi32((__m512i)(sums), (__m512i)(few), \
                                   _mm512_set1_epi32(word)))
#define LOAD_HALVES(halves) \
  ((floats_vnni)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves))))
#define LOWER(a, b) ((floats_vnni)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define HIGHER(a, b) ((floats_vnni)_mm512_max_ps((__m512)(a), (__m512)(b)))
#include "vectors.h"
#include "product.h"
#include "attention.h"
#include "undefine.h"
#ifdef HAS_AMX
#include "amx.h"
#endif

#elif defined(__aarch64__)

#define TARGET __attribute__((target("arch=armv8.2-a+dotprod")))
#define NAME(x) x##_neon
#define LANES 4
#define FMA(a, b, c) \
  ((floats_neon)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define WEIGHT_OFFSET 0
#define PLANES
#define SUMS 2
#define MULTIPLY_ADD(sums, weights, word)                                     \
  ((uints_neon)vdotq_s32((int32x4_t)(sums), (int8x16_t)(weights),             \
                         vreinterpretq_s8_s32(vdupq_n_s32(word))))
#define MULTIPLY_BYTES MULTIPLY_ADD
#define LOAD_HALVES(halves) \
  ((floats_neon)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(halves)))))
#include "vectors.h"
#include "product.h"
#include "attention.h"
#include "undefine.h"

#endif

#define KERNELS(set) KERNELS_OF(set, set, 1, SIZE_MAX, NULL)
#define KERNELS_OF(name, set, groups, tiles_from, end_tiles)                                         \
  {                                                                                                  \
    #name, quantize_##set, int8_tile_##name, float_tile_##set, coarsen_##set, add_rest_##set,          \
        add_product_##set, gelu_##set,                                                               \
        layer_norm_##set, rms_scale_##set, rotate_##set, store_kv_##set, attend_##set, weigh_##set, \
        groups, tiles_from, end_tiles                                                                \
  }

/* From the best to the slowest. */
static const Kernels all_kernels[] = {
#if defined(__x86_64__)
#ifdef HAS_AMX
    KERNELS_OF(amx, vnni, MAX_GROUPS, 2, end_tiles),
#endif
    KERNELS(vnni),
    KERNELS(avx2),
#elif defined(__aarch64__)
    KERNELS(neon),
#endif
    KERNELS(plain),
};
enum { NUM_KERNELS = sizeof all_kernels / sizeof *all_kernels };
const Kernels *kernels = &all_kernels[NUM_KERNELS - 1];

static int is_supported(const char *name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#ifdef HAS_AMX
  if (!strcmp(name, "amx")) return is_supported("vnni") && has_tiles();
#endif
  if (!strcmp(name, "vnni"))
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx2"))
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
#elif defined(__aarch64__)
  if (!strcmp(name, "neon")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
  return !strcmp(name, "plain");
}

const char *use_kernels(const char *name) {
  for (size_t i = 0; i < NUM_KERNELS; i++)
    if ((!name || !strcmp(name, all_kernels[i].name)) && is_supported(all_kernels[i].name))
      return (kernels = &all_kernels[i])->name;
  return NULL;
}

void rotate(float *x, size_t count, size_t n, size_t width) {
  for (size_t i = 0; i < count; i++) kernels->rotate(x + i * n * width, n, width);
}

double softmax_weights(const float *logits, size_t count, float temperature, float *weights) {
  return kernels->weigh(logits, count, temperature, weights);
}

size_t allowed_logits(const float *logits, const uint32_t *mask, size_t count, float *values,
                      int32_t *tokens) {
  size_t found = 0;
  for (size_t begin = 0; begin < count; begin += 32)
    for (uint32_t word = mask[begin / 32]; word; word &= word - 1) {
      const size_t token = begin + (size_t)__builtin_ctz(word);
      values[found] = logits[token];
      tokens[found++] = (int32_t)token;
    }
  return found;
}

/* Whether one of 32 logits is larger than a bound. */
static int any_larger(const float *logits, float bound) {
  float largest[8];
  memcpy(largest, logits, sizeof largest);
  for (size_t i = 8; i < 32; i += 8)
    for (size_t j = 0; j < 8; j++)
      largest[j] = logits[i + j] > largest[j] ? logits[i + j] : largest[j];
  int larger = 0;
  for (size_t j = 0; j < 8; j++) larger |= largest[j] > bound;
  return larger;
}

int32_t allowed_argmax(const float *logits, const uint32_t *mask, size_t count) {
  int32_t best = -1;
  for (size_t begin = 0; begin < count; begin += 32) {
    uint32_t word = mask[begin / 32];
    if (word == UINT32_MAX && best >= 0 && !any_larger(logits + begin, logits[best])) continue;
    for (; word; word &= word - 1) {
      const size_t token = begin + (size_t)__builtin_ctz(word);
      if (best < 0 || logits[token] > logits[best]) best = (int32_t)token;
    }
  }
  return best;
}

int32_t only_allowed(uint32_t *mask, size_t count) {
  int32_t only = -1;
  if (count % 32) mask[count / 32] &= UINT32_MAX >> (32 - count % 32);
  for (size_t begin = 0; begin < count; begin += 32) {
    const uint32_t word = mask[begin / 32];
    if (!word) continue;
    if (only >= 0 || word & (word - 1)) return -2;
    only = (int32_t)(begin + (size_t)__builtin_ctz(word));
  }
  return only;
}
