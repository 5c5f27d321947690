/* Vector registers of one set of instructions, and functions on them that the kernels share. */

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uints) __attribute__((vector_size(4 * LANES))); /* whose sums may wrap around */
#define floats NAME(floats)
#define ints NAME(ints)
#define uints NAME(uints)
#define PARTS (LINE / LANES) /* registers of a line */

TARGET static inline floats NAME(load)(const float *x) {
  floats y;
  memcpy(&y, x, sizeof y);
  return y;
}

TARGET static inline void NAME(store)(float *x, floats y) { memcpy(x, &y, sizeof y); }

/* x in every lane. Compilers optimize subtracting 0 away, but not adding it, which changes -0. */
TARGET static inline floats NAME(all)(float x) { return x - (floats){0}; }

/* a where the mask is set, else b. */
TARGET static inline floats NAME(choose)(ints mask, floats a, floats b) {
  return (floats)((mask & (ints)a) | (~mask & (ints)b));
}

#ifndef WIDE_SUMS
#define WIDE_SUMS(sums) (sums)
#endif

/* The lower and the higher of two numbers; b where one of them is NaN. */
#ifndef LOWER
#define LOWER(a, b) NAME(choose)((a) < (b), a, b)
#define HIGHER(a, b) NAME(choose)((a) > (b), a, b)
#endif

TARGET static inline float NAME(sum)(const floats x[PARTS]) {
  float lanes[LINE];
  memcpy(lanes, x, sizeof lanes);
  for (int width = LINE / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

TARGET static inline float NAME(largest)(const floats x[PARTS]) {
  float lanes[LINE];
  memcpy(lanes, x, sizeof lanes);
  for (int i = 1; i < LINE; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

/* e^x, to 2e-7 of it; e^-87 below -87, and e^88 above 88. 2^n is made in the exponent's bits, and
   2^f for f in [-0.5, 0.5] by the polynomial of least relative error. */
TARGET static inline floats NAME(exponential)(floats x) {
  x = HIGHER(NAME(all)(-87.0f), x);
  x = LOWER(NAME(all)(88.0f), x);
  const floats shifted = FMA(x, NAME(all)(1.44269504f), NAME(all)(12582912.0f)); /* 1.5 * 2^23 */
  const floats n = shifted - 12582912.0f;
  floats f = FMA(n, NAME(all)(-0.693145752f), x); /* ln 2 in two parts, the first exact */
  f = FMA(n, NAME(all)(-1.42860677e-6f), f) * 1.44269504f;
  floats y = NAME(all)(0.000153457998f);
  y = FMA(y, f, NAME(all)(0.00133999311f));
  y = FMA(y, f, NAME(all)(0.009618489f));
  y = FMA(y, f, NAME(all)(0.0555032878f));
  y = FMA(y, f, NAME(all)(0.240226469f));
  y = FMA(y, f, NAME(all)(0.693147206f));
  y = FMA(y, f, NAME(all)(1.0f));
  return y * (floats)(((ints)shifted - 0x4b400000 + 127) << 23);
}

/* erf(x), to 1e-7: an odd polynomial up to 1, 1 - e^-Q(|x|) beyond, fitted for the least error. */
TARGET static inline floats NAME(error_function)(floats x) {
  const ints sign = (ints)x & (int32_t)0x80000000;
  floats a = (floats)((ints)x ^ sign);
  a = LOWER(NAME(all)(4.0f), a);
  const floats u = a * a;
  floats near = NAME(all)(-9.64150947e-06f);
  near = FMA(near, u, NAME(all)(0.000112569456f));
  near = FMA(near, u, NAME(all)(-0.000848282852f));
  near = FMA(near, u, NAME(all)(0.00522094541f));
  near = FMA(near, u, NAME(all)(-0.0268654f));
  near = FMA(near, u, NAME(all)(0.11283782f));
  near = FMA(near, u, NAME(all)(-0.376126384f));
  near = FMA(near, u, NAME(all)(1.12837917f)) * a;
  floats far = NAME(all)(1.3345442e-05f);
  far = FMA(far, a, NAME(all)(-0.000318188939f));
  far = FMA(far, a, NAME(all)(0.00344124485f));
  far = FMA(far, a, NAME(all)(-0.0226386293f));
  far = FMA(far, a, NAME(all)(0.103355496f));
  far = FMA(far, a, NAME(all)(0.639047205f));
  far = FMA(far, a, NAME(all)(1.12595694f));
  far = FMA(far, a, NAME(all)(0.000748422398f));
  far = 1.0f - NAME(exponential)(-far);
  return (floats)((ints)NAME(choose)(a > 1.0f, far, near) | sign);
}

/* Without an instruction for fp16, its bits are moved and 2^112 corrects the exponent: exact also for
   subnormal numbers. Infinity and NaN are never stored. */
#ifdef PLAIN_HALVES
static inline floats NAME(load_halves)(const uint16_t *halves) {
  ints bits;
  for (int i = 0; i < LANES; i++) bits[i] = halves[i];
  const floats magnitude = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
  return (floats)((ints)magnitude | (bits & 0x8000) << 16);
}
#define LOAD_HALVES(halves) NAME(load_halves)((const uint16_t *)(halves))
#endif

/* exp((x - largest) / temperature) and their sum, for sampling. */
TARGET static double NAME(weigh)(const float *x, size_t count, float temperature, float *weights) {
  const size_t whole = count / LANES * LANES;
  floats most = NAME(all)(-INFINITY);
  for (size_t i = 0; i < whole; i += LANES) most = HIGHER(NAME(load)(x + i), most);
  float lanes[LANES], largest = -INFINITY;
  NAME(store)(lanes, most);
  for (size_t i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
  for (size_t i = whole; i < count; i++) largest = x[i] > largest ? x[i] : largest;
  double total = 0;
  for (size_t begin = 0; begin < whole; begin += 16 * LANES) { /* few enough for single precision */
    const size_t end = begin + 16 * LANES < whole ? begin + 16 * LANES : whole;
    floats sums = {0};
    for (size_t i = begin; i < end; i += LANES) {
      const floats weight = NAME(exponential)((NAME(load)(x + i) - largest) / temperature);
      NAME(store)(weights + i, weight);
      sums += weight;
    }
    NAME(store)(lanes, sums);
    for (size_t i = 0; i < LANES; i++) total += (double)lanes[i];
  }
  const size_t left = count - whole;
  memcpy(lanes, x + whole, left * sizeof *lanes); /* the other lanes are not read again */
  NAME(store)(lanes, NAME(exponential)((NAME(load)(lanes) - largest) / temperature));
  memcpy(weights + whole, lanes, left * sizeof *lanes);
  for (size_t i = 0; i < left; i++) total += (double)lanes[i];
  return total;
}
