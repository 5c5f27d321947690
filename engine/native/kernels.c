/* The kernels for each set of instructions, and which of them run.

   vectors.h, product.h and attention.h are included once for each set, with these macros:

       TARGET          the function attribute that lets the compiler use the instructions
       NAME(x)         x with the set's suffix
       LANES           floats of a register
       FMA(a, b, c)    a * b + c
       DOT(sums, packed, four)  adds to LANES int32 the products of four int8 numbers of x with four
                       weights of each of LANES columns
       WEIGHT_OFFSET   how much larger than a weight the number is that DOT multiplies
       LOAD_HALVES, STORE_HALVES  between LANES fp16 in memory and floats
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

/* Plain C, for any processor. Numbers are multiplied in 16 bits, two at a time: the bytes of a register
   at even places, then those at odd ones. */
#define TARGET
#define NAME(x) x##_plain
#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c))
#define WEIGHT_OFFSET 128
#define DOT(sums, packed, four) ((sums) = dot_plain(sums, packed, four))
typedef int16_t shorts_plain __attribute__((vector_size(16)));
typedef int32_t ints_of_shorts __attribute__((vector_size(16)));
static inline ints_of_shorts multiply_pairs(shorts_plain a, shorts_plain b) {
#if defined(__x86_64__)
  return (ints_of_shorts)__builtin_ia32_pmaddwd128(a, b);
#else
  const ints_of_shorts x = (ints_of_shorts)a, y = (ints_of_shorts)b;
  return (x >> 16) * (y >> 16) + (x << 16 >> 16) * (y << 16 >> 16);
#endif
}
static inline ints_of_shorts dot_plain(ints_of_shorts sums, const uint8_t *packed, int32_t four) {
  shorts_plain weights;
  memcpy(&weights, packed, sizeof weights);
  const shorts_plain x = (shorts_plain)(four - (ints_of_shorts){0});
  sums += multiply_pairs(weights & 255, x << 8 >> 8);
  return sums + multiply_pairs(weights >> 8 & 255, x >> 8);
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
#define WEIGHT_OFFSET 0
#define DOT(sums, packed, four) \
  ((sums) = (ints_avx2)dot_avx2((__m256i)(sums), packed, _mm256_set1_epi32(four)))
#define LOAD_HALVES(halves) \
  ((floats_avx2)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves))))
#define STORE_HALVES(halves, x) \
  _mm_storeu_si128((__m128i *)(halves), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
/* maddubs adds products of unsigned with signed numbers in pairs, to 16 bits. 2 * 127 * 127 is the most
   that these hold, so the sign of x goes to the weights, and their 128 is taken off before. */
TARGET static inline __m256i dot_avx2(__m256i sums, const uint8_t *packed, __m256i four) {
  const __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)packed),
                                           _mm256_set1_epi8((char)128));
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(four), _mm256_sign_epi8(weights, four));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
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
#define DOT(sums, packed, four)                                                          \
  ((sums) = (ints_vnni)_mm512_dpbusd_epi32((__m512i)(sums), _mm512_loadu_si512(packed), \
                                           _mm512_set1_epi32(four)))
#define LOAD_HALVES(halves) \
  ((floats_vnni)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(halves))))
#define STORE_HALVES(halves, x)               \
  _mm256_storeu_si256((__m256i *)(halves),    \
                      _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
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
#define DOT(sums, packed, four) ((sums) = (ints_neon)dot_neon((int32x4_t)(sums), packed, four))
#define LOAD_HALVES(halves) \
  ((floats_neon)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(halves)))))
#define STORE_HALVES(halves, x) \
  vst1_u16((uint16_t *)(halves), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(x))))
TARGET static inline int32x4_t dot_neon(int32x4_t sums, const uint8_t *packed, int32_t four) {
  const int8x16_t weights = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(packed), vdupq_n_u8(128)));
  return vdotq_s32(sums, weights, vreinterpretq_s8_s32(vdupq_n_s32(four)));
}
#include "vectors.h"
#include "product.h"
#include "attention.h"
#include "undefine.h"

#endif

#define KERNELS(set) KERNELS_OF(set, set, SIZE_MAX, NULL)
#define KERNELS_OF(name, set, tiles_from, end_tiles)                                             \
  {                                                                                              \
    #name, quantize_##set, int8_tile_##name, float_tile_##set, add_product_##set, gelu_##set,    \
        layer_norm_##set, store_kv_##set, attend_##set, weigh_##set, tiles_from, end_tiles       \
  }

/* From the best to the slowest. */
static const Kernels all_kernels[] = {
#if defined(__x86_64__)
#ifdef HAS_AMX
    KERNELS_OF(amx, vnni, 3, end_tiles), /* with two vectors VNNI is as fast */
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
