/* Products in int8 with the tile registers of AMX, where a pass has more than one token.

   A tile register has up to 16 lines of 64 bytes. One instruction multiplies DEPTH numbers of each of 16
   rows of x, in one plane, with those of a group of columns, as it is packed. Four registers hold the sums
   of both planes with two groups over all of k: integers, so the results are those of VNNI, bit for bit. */

#define TARGET_AMX \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,amx-tile,amx-int8")))

/* Numbers of registers, written into assembly by the intrinsics: the sums of each group with the upper and
   with the lower numbers of x, these, and the weights of each group. */
#define UPPER_SUMS_0 0
#define LOWER_SUMS_0 1
#define UPPER_SUMS_1 2
#define LOWER_SUMS_1 3
#define UPPER_TILE 4
#define LOWER_TILE 5
#define WEIGHTS_TILE_0 6
#define WEIGHTS_TILE_1 7

static __thread size_t lines_of_tiles; /* rows in this thread's tile configuration; 0: none */

/* Requests tiles from Linux, which enables them only then because they enlarge threads' state. */
static int has_tiles(void) {
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

TARGET_AMX static void begin_tiles(size_t rows) {
  if (rows == lines_of_tiles) return;
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t lines[16];
  } config = {.palette = 1};
  for (int tile = 0; tile < 8; tile++) {
    config.bytes[tile] = 64;
    config.lines[tile] = tile < WEIGHTS_TILE_0 ? rows : 16;
  }
  __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc's intrinsic declares 8 of its bytes only */
  _tile_loadconfig(&config);
  lines_of_tiles = rows;
}

/* Releases the tiles after a part's products, so that the system need not save them. */
TARGET_AMX static void end_tiles(void) {
  if (!lines_of_tiles) return;
  _tile_release();
  lines_of_tiles = 0;
}

/* The sums of both planes with group g, times their scales. */
#define STORE_GROUP(g)                                                                             \
  do {                                                                                             \
    int32_t sums[2][MAX_ROWS][LINE];                                                               \
    _tile_stored(UPPER_SUMS_##g, sums[0], 64);                                                     \
    _tile_stored(LOWER_SUMS_##g, sums[1], 64);                                                     \
    const __m512 scales = _mm512_loadu_ps(packed + (g) * bytes + LINE * x->width);                 \
    const __m512i zeros = _mm512_add_epi32(                                                        \
        _mm512_loadu_si512(packed + (g) * bytes + LINE * (x->width + sizeof(float))),              \
        _mm512_set1_epi32(128));                                                                   \
    const __m512 added = _mm512_loadu_ps(bias + (g) * LINE);                                       \
    for (size_t r = 0; r < rows; r++) {                                                            \
      __m512i sum = _mm512_slli_epi32(_mm512_loadu_si512(sums[0][r]), 7);                          \
      sum = _mm512_add_epi32(sum, _mm512_loadu_si512(sums[1][r]));                                 \
      sum = _mm512_sub_epi32(                                                                      \
          sum, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(x->sums[row + r])));                  \
      const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x->scales[row + r]));              \
      _mm512_storeu_ps(out[g][r], _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, added));         \
    }                                                                                              \
  } while (0)

#define MULTIPLY_GROUP(g)                                                   \
  do {                                                                      \
    _tile_loadd(WEIGHTS_TILE_##g, packed + (g) * bytes + LINE * i, 64);     \
    _tile_dpbsud(UPPER_SUMS_##g, UPPER_TILE, WEIGHTS_TILE_##g);             \
    _tile_dpbsud(LOWER_SUMS_##g, LOWER_TILE, WEIGHTS_TILE_##g);             \
  } while (0)

TARGET_AMX static size_t int8_tile_amx(const Quantized *x, size_t row, const uint8_t *packed,
                                       size_t groups, size_t bytes, const float *bias,
                                       float out[][MAX_ROWS][LINE]) {
  if (!x->has_tiles) {
    size_t done = 0;
    for (size_t g = 0; g < groups; g++)
      done = int8_tile_vnni(x, row, packed + g * bytes, 1, bytes, bias + g * LINE, out + g);
    return done;
  }
  const size_t left = x->count - row, rows = left < MAX_ROWS ? left : MAX_ROWS;
  const size_t apart = x->width * MAX_ROWS;
  const int8_t *upper = (const int8_t *)x->fours + row / MAX_ROWS * 2 * apart;
  begin_tiles(rows);
  _tile_zero(UPPER_SUMS_0);
  _tile_zero(LOWER_SUMS_0);
  _tile_zero(UPPER_SUMS_1);
  _tile_zero(LOWER_SUMS_1);
  for (size_t i = 0; i < x->width; i += DEPTH, upper += MAX_ROWS * DEPTH) {
    for (size_t line = 0; row == 0 && line < LINE * DEPTH; line += 64) {
      __builtin_prefetch(packed + LINE * i + TILE_PREFETCH + line);
      if (groups == 2) __builtin_prefetch(packed + bytes + LINE * i + TILE_PREFETCH + line);
    }
    _tile_loadd(UPPER_TILE, upper, DEPTH);
    _tile_loadd(LOWER_TILE, upper + apart, DEPTH);
    MULTIPLY_GROUP(0);
    if (groups == 2) MULTIPLY_GROUP(1);
  }
  STORE_GROUP(0);
  if (groups == 2) STORE_GROUP(1);
  return rows;
}
