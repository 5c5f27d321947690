/* y = x W^T + bias + residual, with W in int8 and x quantized on the way.

   onnxruntime's own (MatMulNBits with eight bits) is made for one row. This reads the weights as fast,
   and eight rows take hardly longer than one: see docs/benchmark.md.

   Columns of y are computed in groups of sixteen, the last of which is filled up with zeros. Of each
   group `packed` has, for one block after the other of the K numbers of a column, filled up as well:

       numbers  (block / 4, 16, 4) uint8: four of the first column, four of the second, ...;
                weights + 128
       scales   (16,) float: what the numbers of a column are multiplied with in this block

   x is quantized in the same blocks, to the largest magnitude in each / 127. Products and sums within
   a block are exact, and blocks are added one after the other. */

#include "matmul.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ZERO 128
#define AHEAD 4096              /* bytes: a processor itself looks no further than to a page's end */
#define MOST_ROWS 12            /* at once */
#define ROUNDING 12582912.0f    /* 1.5 * 2^23 */
#define ROUNDING_BITS 0x4b400000

/* DOT adds the products of four numbers of x, which an int holds, with those of LANES columns. */

#define TARGET
#define NAME(x) x##_plain
#define LANES 4
#define ZERO_OF ZERO
#define DOT(dots, packed, four)                                       \
  {                                                                   \
    ints_plain columns; /* four weights of each, the first of them last */ \
    memcpy(&columns, packed, sizeof columns);                         \
    for (int k = 0; k < 4; k++)                                       \
      (dots) += (columns >> 8 * k & 255) * ((const int8_t *)&(four))[k]; \
  }
#include "tile.h"

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma")))
/* It adds up products of unsigned and signed numbers in pairs, in 16 bits. 2 * 127 * 127 is the most
   that these hold, so the sign of x goes to the weights, and their 128 is taken off before. */
TARGET static inline __m256i dot_avx2(__m256i dots, const uint8_t *packed, __m256i fours) {
  const __m256i weights = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)packed),
                                           _mm256_set1_epi8((char)ZERO));
  const __m256i pairs =
      _mm256_maddubs_epi16(_mm256_abs_epi8(fours), _mm256_sign_epi8(weights, fours));
  return _mm256_add_epi32(dots, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#define NAME(x) x##_avx2
#define LANES 8
#define ZERO_OF 0
#define DOT(dots, packed, four) \
  (dots) = (ints_avx2)dot_avx2((__m256i)(dots), packed, _mm256_set1_epi32(four))
#include "tile.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))
#define NAME(x) x##_vnni
#define LANES 16
#define ZERO_OF ZERO
#define DOT(dots, packed, four)                                                        \
  (dots) = (ints_vnni)_mm512_dpbusd_epi32((__m512i)(dots), _mm512_loadu_si512(packed), \
                                          _mm512_set1_epi32(four))
#include "tile.h"
#endif

typedef struct {
  const char *name;
  void (*quantize)(const float *, size_t, int8_t *, float *, int32_t *);
  size_t (*tile)(const Rows *, size_t, const uint8_t *, const float *, float *);
} Kernels;

/* The best one first. */
static const Kernels all_kernels[] = {
#if defined(__x86_64__)
    {"vnni", quantize_vnni, tile_vnni},
    {"avx2", quantize_avx2, tile_avx2},
#endif
    {"plain", quantize_plain, tile_plain},
};
static const Kernels *use = &all_kernels[sizeof all_kernels / sizeof *all_kernels - 1];

static int is_supported(const char *name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(name, "vnni"))
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !strcmp(name, "plain");
}

const char *use_kernels(const char *wanted) {
  for (size_t i = 0; i < sizeof all_kernels / sizeof *all_kernels; i++)
    if ((!wanted || !strcmp(wanted, all_kernels[i].name)) && is_supported(all_kernels[i].name))
      return (use = &all_kernels[i])->name;
  return NULL;
}

static size_t blocks_of(size_t k, size_t block) { return (k + block - 1) / block; }

size_t rows_bytes(size_t count, size_t k, size_t block) {
  const size_t filled = (count + BESIDE - 1) / BESIDE * BESIDE;
  return filled * blocks_of(k, block) * (sizeof(float) + sizeof(int32_t) + block);
}

size_t packed_bytes(size_t n, size_t k, size_t block) {
  const size_t groups = (n + COLUMNS - 1) / COLUMNS, blocks = blocks_of(k, block);
  return groups * COLUMNS * blocks * (block + sizeof(float));
}

Rows rows_in(void *memory, size_t count, size_t k, size_t block) {
  const size_t blocks = blocks_of(k, block), filled = (count + BESIDE - 1) / BESIDE * BESIDE;
  float *scales = memory;
  int32_t *sums = (int32_t *)(scales + filled * blocks);
  return (Rows){count, blocks * block, blocks, block, sums + filled * blocks, scales, sums};
}

void quantize_row(const Rows *rows, size_t row, const float *x, size_t k) {
  const size_t beside = row % BESIDE, group = row / BESIDE;
  int32_t *fours = rows->fours + group * rows->width + beside;
  for (size_t b = 0, begin = 0; b < rows->blocks; b++, begin += rows->block) {
    int32_t block[MOST_BLOCK / 4] = {0};
    const size_t at = (group * rows->blocks + b) * BESIDE + beside;
    const size_t length = k - begin < rows->block ? k - begin : rows->block;
    use->quantize(x + row * k + begin, length, (int8_t *)block, rows->scales + at, rows->sums + at);
    for (size_t i = 0; i < rows->block / 4; i++, fours += BESIDE) *fours = block[i];
  }
}

void multiply_group(const Rows *rows, size_t group, const Product *product) {
  const size_t n = product->n, begin = group * COLUMNS;
  const size_t columns = n - begin < COLUMNS ? n - begin : COLUMNS;
  const uint8_t *packed =
      product->packed + group * COLUMNS * (rows->width + rows->blocks * sizeof(float));
  float bias[COLUMNS] = {0}, out[MOST_ROWS * COLUMNS];
  if (product->bias) memcpy(bias, product->bias + begin, columns * sizeof(float));
  for (size_t row = 0, done; row < rows->count; row += done) {
    done = use->tile(rows, row, packed, bias, out);
    for (size_t r = 0; r < done; r++) {
      const size_t at = (row + r) * n + begin;
      float *of_row = out + r * COLUMNS;
      if (product->residual)
        for (size_t c = 0; c < columns; c++) of_row[c] += product->residual[at + c];
      memcpy(product->y + at, of_row, columns * sizeof(float));
    }
  }
}
