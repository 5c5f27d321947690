/* Products in int8 with the tile registers of AMX, where a pass has more than a few tokens.

   A tile register has up to 16 lines of 64 bytes. One instruction multiplies 16 vectors of x, a block of
   numbers each, with a block of a group of columns, as it is packed. Sums within a block are integers,
   and blocks are added as in product.h: the results are those of VNNI, bit for bit. */

#define TARGET_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8")))

#define DOTS_TILE 0 /* macros, because intrinsics write the numbers into assembly */
#define X_TILE 1
#define WEIGHTS_TILE 2

static __thread size_t lines_of_tiles, block_of_tiles; /* this thread's tile configuration; 0: none */

/* Requests tiles from Linux, which enables them only then because they enlarge threads' state. */
static int has_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

TARGET_AMX static void begin_tiles(size_t lines, size_t block) {
  if (lines == lines_of_tiles && block == block_of_tiles) return;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  } config = {.palette = 1,
              .bytes = {[DOTS_TILE] = 64, [X_TILE] = block, [WEIGHTS_TILE] = 64},
              .lines = {[DOTS_TILE] = lines, [X_TILE] = lines, [WEIGHTS_TILE] = block / 4}};
  __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc's intrinsic declares 8 of its bytes only */
  _tile_loadconfig(&config);
  lines_of_tiles = lines;
  block_of_tiles = block;
}

/* Releases the tiles after a part's products, so that the system need not save them. */
TARGET_AMX static void end_tiles(void) {
  if (!lines_of_tiles) return;
  _tile_release();
  lines_of_tiles = 0;
}

#define DOT_AMX(v)                                  \
  _mm512_add_epi32(_mm512_loadu_si512(dots[v]), \
                   _mm512_set1_epi32(sums[(v) / BESIDE * others + (v) % BESIDE]))

/* Multiplies R rows of P planes with a group of columns. R and P are constants, R * P is 8 or 16. */
TARGET_AMX INLINE void rows_amx(int R, int P, const Quantized *x, size_t row, const uint8_t *packed,
                                const float *bias, float out[][LINE]) {
  row *= P;
  const int32_t *fours = x->fours + row * (x->width / 4);
  const size_t others = x->blocks * BESIDE; /* from the scales of BESIDE vectors to the next */
  const float *scales = x->scales + row / BESIDE * others + row % BESIDE;
  const int32_t *sums = x->sums + row / BESIDE * others + row % BESIDE;
  const size_t bytes = LINE * x->block; /* of a block's numbers */
  __m512 y[MAX_ROWS];
  EACH(r, R) y[r] = _mm512_loadu_ps(bias);
  begin_tiles(R * P, x->block);
  for (size_t b = 0; b < x->blocks; b++, scales += BESIDE, sums += BESIDE) {
    int32_t dots[MAX_ROWS][LINE];
    for (size_t i = 0; row == 0 && i <= bytes; i += 64)
      __builtin_prefetch(packed + TILE_PREFETCH + i);
    _tile_zero(DOTS_TILE);
    _tile_loadd(X_TILE, fours + b * MAX_ROWS * (x->block / 4), x->block);
    _tile_loadd(WEIGHTS_TILE, packed, 64);
    _tile_dpbsud(DOTS_TILE, X_TILE, WEIGHTS_TILE);
    _tile_stored(DOTS_TILE, dots, 64);
    const __m512 scale = _mm512_loadu_ps(packed + bytes);
    packed += bytes + sizeof scale;
    EACH(r, R) {
      const int v = r * P;
      __m512i dot = DOT_AMX(v);
      if (P == 2) dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 7), DOT_AMX(v + 1));
      const __m512 x_scale = _mm512_set1_ps(scales[v / BESIDE * others + v % BESIDE]);
      y[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scale, x_scale), y[r]);
    }
  }
  EACH(r, R) _mm512_storeu_ps(out[r], y[r]);
}

TARGET_AMX static size_t int8_tile_amx(const Quantized *x, size_t row, const uint8_t *packed,
                                       const float *bias, float out[][LINE]) {
  const size_t left = x->count - row;
  if (x->beside == BESIDE) return int8_tile_vnni(x, row, packed, bias, out);
  /* The rows of a tile beyond the last one are computed, and dropped: that is faster than a tile for
     each power of two. */
#define USE(R, P) return rows_amx(R, P, x, row, packed, bias, out), left < R ? left : R
  if (x->planes == 1 && left > 8) USE(16, 1);
  if (x->planes == 1) USE(8, 1);
  if (left > 4) USE(8, 2);
  USE(4, 2);
#undef USE
}
