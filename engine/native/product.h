/* Products of rows with packed matrices, y = x W^T + bias, for one set of instructions.

   A matrix is packed in groups of LINE columns of y; the last group is filled up with zeros. In fp32 a
   group is (k, LINE) floats. In int8 it has, for each block of `block` numbers of its columns,

       numbers  (block / 4, LINE, 4) uint8: four of the first column, four of the second, ...;
                weight + 128
       scales   (LINE,) float: what the numbers of a column in this block are multiplied by

   Rows of x are quantized in the same blocks, to 8 bits or, in two planes, to 15. Sums within a block
   are exact, and blocks are added one after the other. */

/* Quantizes one block: x is about scale * (128 * upper + lower); with one plane, scale * upper. From the
   block's end to the end of its line x is 0. Each plane's numbers go to `to` by fours, `beside` fours
   apart. A kernel adds `sums` to cancel WEIGHT_OFFSET. */
TARGET INLINE void NAME(quantize_block)(size_t block, size_t planes, size_t beside, const float *x,
                                        int32_t *const to[2], float *scale, int32_t sums[2]) {
  int8_t numbers[2][MAX_BLOCK];
  int32_t lanes[LANES];
  ints most = {0}, total[2] = {{0}};
  for (size_t i = 0; i < padded(block); i += LANES) { /* magnitudes compare as their bits do */
    const ints bits = (ints)NAME(load)(x + i) & 0x7fffffff, larger = bits > most;
    most = (bits & larger) | (most & ~larger);
  }
  int32_t largest_bits = 0;
  memcpy(lanes, &most, sizeof lanes);
  for (int i = 0; i < LANES; i++) largest_bits = lanes[i] > largest_bits ? lanes[i] : largest_bits;
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  const float range = planes == 2 ? 127 * 128 : 127;
  const float times = largest > 0 ? range / largest : 0;
  for (size_t i = 0; i < padded(block); i += LANES) {
    /* 1.5 * 2^23: the last bits are the integer */
    const ints number = (ints)(NAME(load)(x + i) * times + 12582912.0f) - 0x4b400000;
    const ints upper = planes == 2 ? (number + 64) >> 7 : number, lower = number - upper * 128;
    const ints parts[] = {upper, lower};
    for (size_t plane = 0; plane < planes; plane++) {
      const bytes part = __builtin_convertvector(parts[plane], bytes);
      memcpy(numbers[plane] + i, &part, sizeof part);
      total[plane] += parts[plane];
    }
  }
  *scale = largest / range;
  for (size_t plane = 0; plane < planes; plane++) {
    int32_t *const fours = to[plane];
    for (size_t i = 0; i < block / 4; i++) memcpy(fours + i * beside, numbers[plane] + 4 * i, 4);
    memcpy(lanes, &total[plane], sizeof lanes);
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    sums[plane] = -WEIGHT_OFFSET * sum;
  }
}

TARGET static void NAME(quantize)(const float *x, size_t block, size_t planes, size_t beside,
                                  int32_t *const to[2], float *scale, int32_t sums[2]) {
  if (planes == 1 && block == MAX_BLOCK)
    NAME(quantize_block)(MAX_BLOCK, 1, beside, x, to, scale, sums);
  else if (block == MAX_BLOCK)
    NAME(quantize_block)(MAX_BLOCK, 2, beside, x, to, scale, sums);
  else
    NAME(quantize_block)(block, planes, beside, x, to, scale, sums);
}

/* Multiplies R rows of P planes with a group of columns; R and P are constants. */
TARGET INLINE void NAME(int8_rows)(int R, int P, const Quantized *x, size_t row,
                                   const uint8_t *packed, const float *bias, float out[][LINE]) {
  row *= P;
  const int32_t *fours = x->fours + row / BESIDE * x->width + row % BESIDE;
  const size_t others = x->blocks * BESIDE; /* from BESIDE rows to the next */
  const float *scales = x->scales + row / BESIDE * others + row % BESIDE;
  const int32_t *sums = x->sums + row / BESIDE * others + row % BESIDE;
  floats y[MAX_ROWS][PARTS];
  EACH(r, R) EACH(p, PARTS) y[r][p] = NAME(load)(bias + p * LANES);
  for (size_t b = 0; b < x->blocks; b++, scales += BESIDE, sums += BESIDE) {
    ints dots[MAX_ROWS][PARTS];
    EACH(v, R * P) EACH(p, PARTS)
      dots[v][p] = (ints){0} + sums[v / BESIDE * others + v % BESIDE];
    _Pragma("GCC unroll 4") for (size_t i = 0; i < x->block; i += 4) {
      __builtin_prefetch(packed + TILE_PREFETCH);
      EACH(v, R * P) EACH(p, PARTS)
        DOT(dots[v][p], packed + 4 * LANES * p, fours[v / BESIDE * x->width + v % BESIDE]);
      packed += 4 * LINE;
      fours += BESIDE;
    }
    floats scale[PARTS];
    memcpy(scale, packed, sizeof scale);
    packed += sizeof scale;
    EACH(r, R) EACH(p, PARTS) {
      const int v = r * P;
      const ints sum = P == 1 ? dots[v][p] : dots[v][p] * 128 + dots[v + 1][p];
      y[r][p] = FMA(__builtin_convertvector(sum, floats),
                    scale[p] * scales[v / BESIDE * others + v % BESIDE], y[r][p]);
    }
  }
  EACH(r, R) memcpy(out[r], y[r], sizeof *out);
}

TARGET static size_t NAME(int8_tile)(const Quantized *x, size_t row, const uint8_t *packed,
                                     const float *bias, float out[][LINE]) {
  const size_t left = x->count - row;
#define USE(R, P) \
  if (x->planes == P && left >= R) return NAME(int8_rows)(R, P, x, row, packed, bias, out), R
#if LANES == LINE
  USE(12, 1);
  USE(8, 1);
  USE(6, 2);
  USE(4, 2);
#endif
  USE(4, 1);
  USE(2, 1);
  USE(1, 1);
  USE(2, 2);
  USE(1, 2);
#undef USE
  return 0;
}

/* Multiplies R rows with a group of columns; R is a constant. */
TARGET INLINE void NAME(float_rows)(int R, const float *x, size_t stride, size_t k,
                                    const float *packed, const float *bias, float out[][LINE]) {
  floats y[MAX_ROWS][PARTS];
  EACH(r, R) EACH(p, PARTS) y[r][p] = NAME(load)(bias + p * LANES);
  for (size_t i = 0; i < k; i++, packed += LINE) {
    __builtin_prefetch((const uint8_t *)packed + TILE_PREFETCH);
    EACH(p, PARTS) {
      const floats w = NAME(load)(packed + p * LANES);
      EACH(r, R) y[r][p] = FMA(NAME(all)(x[r * stride + i]), w, y[r][p]);
    }
  }
  EACH(r, R) memcpy(out[r], y[r], sizeof *out);
}

TARGET static size_t NAME(float_tile)(const float *x, size_t count, size_t stride, size_t k,
                                      const float *packed, const float *bias, float out[][LINE]) {
#define USE(R) \
  if (count >= R) return NAME(float_rows)(R, x, stride, k, packed, bias, out), R
#if LANES == LINE
  USE(12);
  USE(8);
#endif
  USE(4);
  USE(2);
  USE(1);
#undef USE
  return 0;
}

/* Adds the product of one row with a group of columns of k numbers, floats or halves, to y (LINE,). Four
   sums, because each addition to a single sum would wait for the one before. */
TARGET INLINE void NAME(add_row)(int half, const float *x, size_t k, const uint8_t *packed, float *y) {
  const size_t bytes = LANES * (half ? sizeof(uint16_t) : sizeof(float));
  const uint8_t *end = packed + k * PARTS * bytes;
  floats sums[4][PARTS] = {{{0}}};
  EACH(p, PARTS) sums[0][p] = NAME(load)(y + p * LANES);
  for (size_t i = 0; i < k; i += 4) {
    const int count = k - i < 4 ? (int)(k - i) : 4;
    if (packed + TILE_PREFETCH < end) /* memory after the group is not needed next */
      for (size_t line = 0; line < 4 * PARTS * bytes; line += 64)
        __builtin_prefetch(packed + TILE_PREFETCH + line);
    EACH(j, 4) {
      if (j >= count) break;
      EACH(p, PARTS) {
        const floats w = half ? LOAD_HALVES(packed) : NAME(load)((const float *)packed);
        packed += bytes;
        sums[j][p] = FMA(NAME(all)(x[i + j]), w, sums[j][p]);
      }
    }
  }
  EACH(p, PARTS)
    NAME(store)(y + p * LANES, (sums[0][p] + sums[1][p]) + (sums[2][p] + sums[3][p]));
}

TARGET static void NAME(add_product)(int half, const float *x, size_t k, const void *packed,
                                     float *y) {
  if (half)
    NAME(add_row)(1, x, k, packed, y);
  else
    NAME(add_row)(0, x, k, packed, y);
}
