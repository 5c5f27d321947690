/* The instructions of VNNI and AMX in C: with `-include` of this file, random_passes computes with their
   kernels on any processor with AVX2. Tiles that do not fit together end the program, as on AMX. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define target(instructions) /* what is left of __attribute__((target("..."))) is allowed */
#define __builtin_cpu_supports(instructions) 1
#define syscall(number, ...) ((number) == SYS_arch_prctl ? 0 : syscall(number, __VA_ARGS__))

typedef float floats16 __attribute__((vector_size(64)));
typedef int32_t ints16 __attribute__((vector_size(64)));
typedef uint32_t uints16 __attribute__((vector_size(64)));

static inline uints16 load16(const void *memory) {
  uints16 x;
  memcpy(&x, memory, sizeof x);
  return x;
}

static inline void store16(void *memory, floats16 x) { memcpy(memory, &x, sizeof x); }

static inline floats16 fma16(floats16 a, floats16 b, floats16 c) {
  for (int i = 0; i < 16; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
}

static inline floats16 choose16(ints16 mask, floats16 a, floats16 b) {
  return (floats16)((mask & (ints16)a) | (~mask & (ints16)b));
}

static inline floats16 halves16(__m256i halves) {
  uint16_t of[16];
  floats16 x;
  memcpy(of, &halves, sizeof of);
  for (int i = 0; i < 16; i++) x[i] = _cvtsh_ss(of[i]);
  return x;
}

static inline uints16 dot16(uints16 sum, ints16 a, ints16 b) {
  return sum + (uints16)((a << 16 >> 16) * (b << 16 >> 16)) + (uints16)((a >> 16) * (b >> 16));
}

static inline uints16 bytes16(uints16 sum, uints16 a, ints16 b) {
  for (int i = 0; i < 4; i++)
    sum += (uints16)((ints16)(a >> 8 * i & 0xff) * (b << (24 - 8 * i) >> 24));
  return sum;
}

#define _mm512_loadu_ps(memory) ((__m512)load16(memory))
#define _mm512_loadu_si512(memory) ((__m512i)load16(memory))
#define _mm512_storeu_ps(memory, x) store16(memory, (floats16)(x))
#define _mm512_set1_ps(x) ((__m512)((x) - (floats16){0}))
#define _mm512_set1_epi32(x) ((__m512i)((x) - (ints16){0}))
#define _mm512_add_epi32(a, b) ((__m512i)((uints16)(a) + (uints16)(b)))
#define _mm512_sub_epi32(a, b) ((__m512i)((uints16)(a) - (uints16)(b)))
#define _mm512_mullo_epi32(a, b) ((__m512i)((uints16)(a) * (uints16)(b)))
#define _mm512_slli_epi32(a, count) ((__m512i)((uints16)(a) << (count)))
#define _mm512_cvtepi32_ps(a) ((__m512)__builtin_convertvector((ints16)(a), floats16))
#define _mm512_mul_ps(a, b) ((__m512)((floats16)(a) * (floats16)(b)))
#define _mm512_fmadd_ps(a, b, c) ((__m512)fma16((floats16)(a), (floats16)(b), (floats16)(c)))
#define _mm512_min_ps(a, b) \
  ((__m512)choose16((floats16)(a) < (floats16)(b), (floats16)(a), (floats16)(b)))
#define _mm512_max_ps(a, b) \
  ((__m512)choose16((floats16)(a) > (floats16)(b), (floats16)(a), (floats16)(b)))
#define _mm512_cvtph_ps(halves) ((__m512)halves16(halves))
#define _mm512_dpwssd_epi32(sum, a, b) ((__m512i)dot16((uints16)(sum), (ints16)(a), (ints16)(b)))
#define _mm512_dpbusd_epi32(sum, a, b) ((__m512i)bytes16((uints16)(sum), (uints16)(a), (ints16)(b)))

typedef struct {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t lines[16];
} TileConfig;

static __thread TileConfig tile_config;
static __thread uint8_t tiles[8][16][64];

static inline void check_tile(int tile) { /* undefined without a configuration */
  if (tile_config.palette != 1 || tile_config.bytes[tile] > 64 || tile_config.lines[tile] > 16) abort();
}

static inline void copy_tile(int tile, void *memory, long stride, int is_store) {
  check_tile(tile);
  for (int line = 0; line < tile_config.lines[tile]; line++) {
    uint8_t *at = (uint8_t *)memory + line * stride;
    if (is_store)
      memcpy(at, tiles[tile][line], tile_config.bytes[tile]);
    else
      memcpy(tiles[tile][line], at, tile_config.bytes[tile]);
  }
}

/* Adds to sums (M, N) int32 the products of a (M, K, 4) int8 with b (K, N, 4) uint8. */
static inline void multiply_tiles(int sums, int a, int b) {
  const TileConfig *config = &tile_config;
  const int depth = config->bytes[a] / 4, columns = config->bytes[b] / 4;
  check_tile(sums), check_tile(a), check_tile(b);
  if (config->lines[sums] != config->lines[a] || config->lines[b] != depth ||
      config->bytes[sums] != config->bytes[b])
    abort();
  for (int m = 0; m < config->lines[a]; m++)
    for (int n = 0; n < columns; n++) {
      uint32_t sum;
      memcpy(&sum, &tiles[sums][m][4 * n], 4);
      for (int k = 0; k < depth; k++)
        for (int i = 0; i < 4; i++)
          sum += (uint32_t)((int8_t)tiles[a][m][4 * k + i] * tiles[b][k][4 * n + i]);
      memcpy(&tiles[sums][m][4 * n], &sum, 4);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig(config) ((void)memcpy(&tile_config, config, sizeof tile_config))
#define _tile_release() ((void)memset(&tile_config, 0, sizeof tile_config))
#define _tile_loadd(tile, memory, stride) copy_tile(tile, (void *)(uintptr_t)(memory), stride, 0)
#define _tile_stored(tile, memory, stride) copy_tile(tile, memory, stride, 1)
#define _tile_zero(tile) ((void)(check_tile(tile), memset(tiles[tile], 0, sizeof tiles[tile])))
#define _tile_dpbsud(sums, a, b) multiply_tiles(sums, a, b)
