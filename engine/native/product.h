/* Products of rows with packed matrices, y = x W^T + bias, for one set of instructions.

   A matrix is packed in groups of LINE columns of y; the last group is filled up with zeros. In fp32 a
   group is (k, LINE) floats. In int8, where k is filled up to whole DEPTHs, it has

       numbers  (k / 4, LINE, 4) uint8: four of the first column, four of the second, ...
       scales   (LINE,) float
       zeros    (LINE,) int32; a column's weight is scale * (number - 128 - zero)

   A matrix in few bits has 1, 2 or 3 a number; its value is odd: twice the bits, less the largest that they
   may be. It is multiplied with x in 8 bits, which is enough for the little that it adds. A group has for
   each DEPTH of k

       two bits  (DEPTH / 16, LINE, 4) uint8, if it has 2 or 3: byte i of four f in a line has the upper
                 two bits of number 4 f + i at 2 (f % 4)
       one bit   (DEPTH / 32, LINE, 4) uint8, if it has 1 or 3: the lowest, at f % 8
       scales    (LINE,) float, behind the last DEPTH

   Rows of x are quantized to 15 bits, with a scale for each. Sums over k are integers: exact in any order,
   and the same in all sets of instructions. */

/* Weights of LANES columns, four of each, as MULTIPLY_ADD reads them: pairs of int16 at even and at odd
   places, or int8. */
typedef struct {
  ints numbers[2];
} NAME(Weights);

/* Sums of products: one or, where two are faster or multiplied with two planes, two. */
typedef struct {
  uints sums[SUMS];
} NAME(Dots);

TARGET INLINE ints NAME(load_four)(const uint8_t *packed) {
  ints four;
  memcpy(&four, packed, sizeof four);
  return four;
}

TARGET INLINE NAME(Weights) NAME(load_weights)(const uint8_t *packed) {
  const ints four = NAME(load_four)(packed);
#ifdef PLANES
  return (NAME(Weights)){{four ^ (int32_t)0x80808080, four ^ (int32_t)0x80808080}};
#else
  return (NAME(Weights)){{four & 0x00ff00ff, four >> 8 & 0x00ff00ff}};
#endif
}

TARGET INLINE NAME(Dots) NAME(begin_dots)(ints sum) {
  NAME(Dots) dots = {{{0}}};
  dots.sums[SUMS - 1] = (uints)sum;
  return dots;
}

/* Adds the products of weights with the two words of a four of x. */
TARGET INLINE void NAME(dot)(NAME(Dots) *dots, NAME(Weights) weights, const int32_t *four) {
  EACH(i, 2)
    dots->sums[i * (SUMS - 1)] = MULTIPLY_ADD(dots->sums[i * (SUMS - 1)], weights.numbers[i], four[i]);
}

TARGET INLINE ints NAME(total)(NAME(Dots) dots) {
#ifdef PLANES
  return (ints)((dots.sums[0] << 7) + dots.sums[1]);
#else
  return (ints)(SUMS == 2 ? dots.sums[0] + dots.sums[SUMS - 1] : dots.sums[0]);
#endif
}

/* Writes four numbers as two words, see Quantized. */
TARGET INLINE void NAME(store_four)(int32_t *words, const int32_t numbers[4]) {
#ifdef PLANES
  int8_t planes[8];
  for (int i = 0; i < 4; i++) {
    const int32_t upper = (numbers[i] + 64) >> 7;
    planes[i] = (int8_t)upper;
    planes[4 + i] = (int8_t)(numbers[i] - upper * 128);
  }
  memcpy(words, planes, sizeof planes);
#else
  uint64_t two[2];
  memcpy(two, numbers, sizeof two);
  const uint64_t halves = 0x0000ffff0000ffff, pairs = (two[0] & halves) | (two[1] & halves) << 16;
  memcpy(words, &pairs, sizeof pairs);
#endif
}

/* The largest magnitude of x (k,); NaN or infinity if one of them is. Magnitudes compare as bits do. */
TARGET static float NAME(largest_magnitude)(const float *x, size_t k) {
  ints most = {0};
  int32_t lanes[LANES], largest_bits = 0;
  size_t i = 0;
  for (; i + LANES <= k; i += LANES) {
    const ints bits = (ints)NAME(load)(x + i) & 0x7fffffff, larger = bits > most;
    most = (bits & larger) | (most & ~larger);
  }
  memcpy(lanes, &most, sizeof lanes);
  for (int lane = 0; lane < LANES; lane++)
    largest_bits = lanes[lane] > largest_bits ? lanes[lane] : largest_bits;
  for (; i < k; i++) {
    int32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest_bits = bits > largest_bits ? bits : largest_bits;
  }
  float largest;
  memcpy(&largest, &largest_bits, sizeof largest);
  return largest;
}

/* Rounds x (count,), at most DEPTH numbers, times a factor to `numbers`, with zeros behind them. */
TARGET INLINE void NAME(round_depth)(const float *x, size_t count, float times,
                                     int32_t numbers[DEPTH]) {
  float line[DEPTH] = {0};
  if (count < DEPTH) x = memcpy(line, x, count * sizeof *x);
  EACH(i, DEPTH / LANES) { /* 1.5 * 2^23: the last bits are the integer */
    const floats shifted = NAME(load)(x + i * LANES) * times + 12582912.0f;
    const ints number = (ints)shifted - 0x4b400000;
    memcpy(numbers + i * LANES, &number, sizeof number);
  }
}

TARGET INLINE uint32_t NAME(sum_of)(const int32_t numbers[DEPTH]) {
  uints total = {0}, four;
  uint32_t lanes[LANES], sum = 0;
  for (int i = 0; i < DEPTH; i += LANES) {
    memcpy(&four, numbers + i, sizeof four);
    total += four;
  }
  memcpy(lanes, &total, sizeof lanes);
  for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

/* Writes DEPTH numbers for tile registers, see Quantized; their planes are `apart` bytes apart. */
TARGET INLINE void NAME(store_planes)(const int32_t numbers[DEPTH], int8_t *planes, size_t apart) {
  EACH(i, DEPTH) {
    const int32_t upper = (numbers[i] + 64) >> 7;
    planes[i] = (int8_t)upper;
    planes[apart + i] = (int8_t)(numbers[i] - upper * 128);
  }
}

/* Quantizes x (k,) to fours (see Quantized) that are `beside` fours apart or, if `apart` is not 0, to
   planes for tile registers. Returns the scale; `total` is the sum of the numbers, modulo 2^32. */
TARGET INLINE float NAME(quantize_to)(const float *x, size_t k, size_t products, size_t beside,
                                      size_t apart, int32_t *fours, int32_t *total) {
  const float largest = NAME(largest_magnitude)(x, k), range = (float)largest_number(products);
  const float times = largest > 0 ? range / largest : 0;
  uint32_t sum = 0;
  for (size_t begin = 0; begin < k; begin += DEPTH) {
    int32_t numbers[DEPTH];
    NAME(round_depth)(x + begin, k - begin < DEPTH ? k - begin : DEPTH, times, numbers);
    sum += NAME(sum_of)(numbers);
    if (apart) {
      NAME(store_planes)(numbers, (int8_t *)fours + begin * MAX_ROWS, apart);
      continue;
    }
    for (size_t i = 0; i < DEPTH / 4; i++)
      NAME(store_four)(fours + (begin / 2 + 2 * i) * beside, numbers + 4 * i);
  }
  *total = (int32_t)sum;
  return largest / range;
}

TARGET static void NAME(quantize)(const float *x, size_t k, float scale, const Quantized *to,
                                  size_t row) {
  int32_t *fours = to->fours + (row / BESIDE * to->width + row % BESIDE) * 2;
  const size_t apart = to->has_tiles ? to->width * MAX_ROWS : 0;
  if (apart) fours = to->fours + (row / MAX_ROWS * 2 * apart + row % MAX_ROWS * DEPTH) / 4;
  to->scales[row] = NAME(quantize_to)(x, k, k, BESIDE, apart, fours, &to->sums[row]) * scale;
}

/* Quantizes x (k,) to 8 bits. */
TARGET static void NAME(coarsen)(const float *x, size_t k, float scale, const Coarse *to, size_t row) {
  const float largest = NAME(largest_magnitude)(x, k), times = largest > 0 ? 127 / largest : 0;
  uint32_t total = 0;
  int8_t *coarse = to->numbers + row * to->width;
  for (size_t begin = 0; begin < k; begin += DEPTH, coarse += DEPTH) {
    int32_t numbers[DEPTH];
    NAME(round_depth)(x + begin, k - begin < DEPTH ? k - begin : DEPTH, times, numbers);
    total += NAME(sum_of)(numbers);
    for (size_t i = 0; i < DEPTH; i++) coarse[i] = (int8_t)numbers[i];
  }
  to->scales[row] = largest / 127 * scale;
  to->sums[row] = (int32_t)total;
}

/* Multiplies R rows with a group of columns; R is a constant. */
TARGET INLINE void NAME(int8_rows)(int R, const Quantized *x, size_t row, const uint8_t *packed,
                                   const float *bias, float out[][LINE]) {
  const int32_t *fours = x->fours + (row / BESIDE * x->width + row % BESIDE) * 2;
  NAME(Dots) dots[MAX_ROWS][PARTS];
  EACH(r, R) EACH(p, PARTS) dots[r][p] = NAME(begin_dots)((ints){0});
  _Pragma("GCC unroll 4") for (size_t i = 0; i < x->width; i += 4) {
    __builtin_prefetch(packed + TILE_PREFETCH);
    EACH(p, PARTS) {
      const NAME(Weights) weights = NAME(load_weights)(packed + 4 * LANES * p);
      EACH(r, R)
        NAME(dot)(&dots[r][p], weights, fours + (r / BESIDE * x->width + r % BESIDE) * 2);
    }
    packed += 4 * LINE;
    fours += 2 * BESIDE;
  }
  EACH(p, PARTS) {
    const floats scales = NAME(load)((const float *)packed + p * LANES);
    uints zeros;
    memcpy(&zeros, packed + (LINE + p * LANES) * sizeof(float), sizeof zeros);
    EACH(r, R) {
      const uints sum = (uints)NAME(total)(dots[r][p]) -
                        (zeros + WEIGHT_OFFSET) * (uint32_t)x->sums[row + r];
      NAME(store)(out[r] + p * LANES, FMA(__builtin_convertvector((ints)sum, floats),
                                          scales * x->scales[row + r], NAME(load)(bias + p * LANES)));
    }
  }
}

TARGET static size_t NAME(int8_tile)(const Quantized *x, size_t row, const uint8_t *packed,
                                     size_t groups, size_t bytes, const float *bias,
                                     float out[][MAX_ROWS][LINE]) {
  const size_t left = x->count - row;
  (void)groups, (void)bytes;
#define USE(R) \
  if (left >= R) return NAME(int8_rows)(R, x, row, packed, bias, out[0]), R
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

/* Numbers 16 word + 4 f to 16 word + 4 f + 3 of a DEPTH in few bits, as bytes, for register p of a group. */
TARGET INLINE ints NAME(few_bits)(int bits, const uint8_t *packed, int word, int f, int p) {
  ints upper = {0}, lowest = {0};
  if (bits & 2) {
    upper = NAME(load_four)(packed + (word * LINE + p * LANES) * 4) >> 2 * f & 0x03030303;
    packed += rest_depth_bytes(2);
  }
  if (bits & 1)
    lowest = NAME(load_four)(packed + (word / 2 * LINE + p * LANES) * 4) >> (word % 2 * 4 + f) &
             0x01010101;
  return bits == 3 ? upper + upper + lowest : upper + lowest;
}

/* Adds the products of R rows with a group of columns in few bits to out; R and bits are constants. */
TARGET INLINE void NAME(rest_rows)(int R, int bits, const Coarse *x, size_t row,
                                   const uint8_t *packed, float out[][LINE]) {
  const int8_t *numbers = x->numbers + row * x->width;
  const int chains = R == 1 ? 2 * SUMS : 1; /* sums of a row that do not wait for each other */
  uints sums[MAX_ROWS][PARTS] = {{{0}}};
  for (size_t i = 0; i < x->width; i += DEPTH, packed += rest_depth_bytes(bits)) {
    uints of_depth[MAX_ROWS][PARTS][4] = {{{{0}}}};
    for (size_t line = 0; line < rest_depth_bytes(bits); line += 64)
      __builtin_prefetch(packed + REST_PREFETCH + line);
    _Pragma("GCC unroll 1") for (int word = 0; word < DEPTH / 16; word++, numbers += 16)
      EACH(f, 4) EACH(p, PARTS) {
        const ints few = NAME(few_bits)(bits, packed, word, f, p);
        EACH(r, R) {
          uints *sum = &of_depth[r][p][f % chains];
          int32_t four;
          memcpy(&four, numbers + r * x->width + 4 * f, sizeof four);
          *sum = MULTIPLY_BYTES(*sum, few, four);
        }
      }
    EACH(r, R) EACH(p, PARTS) EACH(c, chains) sums[r][p] += WIDE_SUMS(of_depth[r][p][c]);
  }
  EACH(r, R) EACH(p, PARTS) {
    uints sum = sums[r][p];
    sum += sum - ((1u << bits) - 1) * (uint32_t)x->sums[row + r];
    const floats scales = NAME(load)((const float *)packed + p * LANES) * x->scales[row + r];
    float *y = out[r] + p * LANES;
    NAME(store)(y, NAME(load)(y) + __builtin_convertvector((ints)sum, floats) * scales);
  }
}

TARGET static void NAME(add_rest)(const Coarse *x, size_t row, size_t count,
                                  const uint8_t *packed, int bits, float out[][LINE]) {
  while (count) {
#define USE(R, bits) NAME(rest_rows)(R, bits, x, row, packed, out)
#define USE_ROWS(R)          \
  if (count >= R) {          \
    if (bits == 1) USE(R, 1); \
    if (bits == 2) USE(R, 2); \
    if (bits == 3) USE(R, 3); \
    out += R, row += R, count -= R; \
    continue;                \
  }
#if LANES == LINE
    USE_ROWS(8);
#endif
    USE_ROWS(4);
    USE_ROWS(2);
    USE_ROWS(1);
#undef USE_ROWS
#undef USE
  }
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
