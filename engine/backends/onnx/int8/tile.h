/* The products of some rows with the sixteen columns of a group, and the quantization of a row, for
   one set of instructions. matmul.c includes this once for each of them, with TARGET, NAME(x), LANES
   (numbers of a register), DOT, and ZERO_OF: what DOT takes a weight's number to be too large by.

   A row's result is the same alone and among others: all add up in the same order. */

TARGET static void NAME(quantize)(const float *x, size_t k, int8_t *numbers, float *scale,
                                  int32_t *sum) {
  /* Magnitudes compare as their bits do, and compilers take these many at a time. */
  uint32_t most = 0;
  for (size_t i = 0; i < k; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  float largest;
  memcpy(&largest, &most, 4);
  const float times = largest > 0 ? 127 / largest : 0;
  int32_t all = 0;
  for (size_t i = 0; i < k; i++) {
    const float shifted = x[i] * times + ROUNDING; /* its last bits are the nearest integer */
    int32_t number;
    memcpy(&number, &shifted, 4);
    number -= ROUNDING_BITS;
    numbers[i] = (int8_t)number;
    all += (int8_t)number;
  }
  *scale = largest / 127;
  *sum = -ZERO_OF * all;
}

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));

#define TILE(R)                                                                              \
  TARGET static void NAME(tile_##R)(const Rows *x, size_t row, const uint8_t *packed,        \
                                    const float *bias, float *out) {                         \
    const int32_t *fours = x->fours + row / BESIDE * x->width + row % BESIDE;                \
    const size_t others = x->blocks * BESIDE; /* from some rows to the next */               \
    const float *scales = x->scales + row / BESIDE * others + row % BESIDE;                  \
    const int32_t *sums = x->sums + row / BESIDE * others + row % BESIDE;                    \
    NAME(floats) y[R][PARTS];                                                                \
    for (int r = 0; r < R; r++) memcpy(y[r], bias, sizeof y[r]);                             \
    for (size_t b = 0; b < x->blocks; b++, scales += BESIDE, sums += BESIDE) {               \
      NAME(ints) dots[R][PARTS];                                                             \
      EACH(r, R) EACH(p, PARTS)                                                              \
        dots[r][p] = (NAME(ints)){0} + sums[r / BESIDE * others + r % BESIDE];               \
      _Pragma("GCC unroll 4") for (size_t i = 0; i < x->block; i += 4) {                     \
        __builtin_prefetch(packed + AHEAD);                                                  \
        EACH(r, R) EACH(p, PARTS)                                                            \
          DOT(dots[r][p], packed + 4 * LANES * p, fours[r / BESIDE * x->width + r % BESIDE]); \
        packed += 4 * COLUMNS;                                                               \
        fours += BESIDE;                                                                     \
      }                                                                                      \
      NAME(floats) scale[PARTS];                                                             \
      memcpy(scale, packed, sizeof scale);                                                   \
      packed += sizeof scale;                                                                \
      EACH(r, R) EACH(p, PARTS)                                                              \
        y[r][p] += __builtin_convertvector(dots[r][p], NAME(floats)) *                       \
                   (scale[p] * scales[r / BESIDE * others + r % BESIDE]);                    \
    }                                                                                        \
    memcpy(out, y, sizeof y);                                                                \
  }
#define PARTS (COLUMNS / LANES)
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < count; i++)

TILE(1)
TILE(2)
TILE(4)
#if LANES == COLUMNS
TILE(8)
TILE(12)
#endif

/* Of the rows from `row` on: out (the returned number, 16). */
TARGET static size_t NAME(tile)(const Rows *x, size_t row, const uint8_t *packed,
                                const float *bias, float *out) {
  const size_t left = x->count - row;
#define USE(R) \
  if (left >= R) return NAME(tile_##R)(x, row, packed, bias, out), R
#if LANES == COLUMNS
  USE(12);
  USE(8);
#endif
  USE(4);
  USE(2);
  USE(1);
  return 0;
}

#undef USE
#undef EACH
#undef TILE
#undef TARGET
#undef NAME
#undef LANES
#undef PARTS
#undef DOT
#undef ZERO_OF
