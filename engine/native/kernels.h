/* The functions that a pass is made of, for one set of instructions, see kernels.c. */

#ifndef KERNELS_H
#define KERNELS_H

#include "pass.h"

enum {
  BESIDE = 4,       /* rows whose quantized numbers lie beside each other */
  DEPTH = 64,       /* the numbers of a packed int8 column are filled up to a multiple of these */
  MAX_ROWS = 16,    /* rows of a tile */
  MAX_GROUPS = 2,   /* groups of columns of a tile */
  MAX_QUERIES = 12, /* queries of one row and head that attention computes at once */
  REST_PREFETCH = 1024, /* bytes of an adapter's few bits that are prefetched */
  FEW_QUERIES = 4,  /* with so many queries of a row or fewer, it computes several heads at once */
  MAX_SUMS = 16     /* of lines of values, that attention has in registers */
};

static inline size_t whole_depths(size_t k) { return (k + DEPTH - 1) / DEPTH * DEPTH; }

/* Bytes of DEPTH numbers of a group of columns in `bits` bits. */
static inline size_t rest_depth_bytes(int bits) { return DEPTH * LINE / 8 * (size_t)bits; }

/* The largest magnitude of weights of scale 1, less a column's zero. A larger one would leave x fewer than
   15 bits in sums over 768 products. */
enum { LARGEST_WEIGHT = 168 };

/* The largest number that x is quantized to for a sum over k products with weights: 15 bits, or fewer
   where the sum might not fit into 32. */
static inline int32_t largest_number(size_t k) {
  const size_t most = INT32_MAX / LARGEST_WEIGHT / k;
  return most < 127 * 128 ? (int32_t)most : 127 * 128;
}

/* Rows of floats, quantized: x is about scale * number. Four numbers take two words: n0 and n2, n1 and n3
   as int16 or, where instructions multiply int8, in two planes, number = 128 * upper + lower: four uppers,
   four lowers. The fours of BESIDE rows are interleaved. For tile registers they are not: DEPTH uppers of
   MAX_ROWS rows, one row after the other, then the next DEPTH; and the same of the lowers. */
typedef struct {
  size_t count, width;  /* width: numbers of a row, whole DEPTHs */
  int has_tiles;
  int32_t *fours; /* (count / BESIDE, width / 4, BESIDE, 2) or
                     (count / MAX_ROWS, 2, width / DEPTH, MAX_ROWS, DEPTH) int8 */
  float *scales;  /* (count,) */
  int32_t *sums;  /* (count,): of a row's numbers */
} Quantized;

/* Rows of floats in 8 bits: x is about scale * number. */
typedef struct {
  size_t width;    /* numbers of a row, whole DEPTHs */
  int8_t *numbers; /* (count, width) */
  float *scales;   /* (count,) */
  int32_t *sums;   /* (count,): of the numbers */
} Coarse;

/* The input of attention for one row and `heads` adjacent heads. pages[i]: the first head's keys on the
   row's i-th page; the other heads' keys follow, see pass.c. */
typedef struct {
  const float *q; /* (count, stride) */
  const uint8_t *const *pages;
  size_t heads, size;        /* size: of a head */
  size_t head_bytes, values; /* bytes from a head's keys to the next head's, and to its own values */
  size_t stride, out_stride;
  size_t position;   /* of the first query */
  size_t max_length; /* of the model's rows */
  float scale;
  int int8; /* keys and values in int8, else fp32 */
} Queries;

/* Quantized queries of attention, whose fours are not interleaved. */
typedef struct {
  float *scales;
  int32_t *sums, *fours;
  size_t stride; /* words of a query */
} Rounded;

/* Floats of memory that attention needs for `queries` queries, of all heads together, of a row of at most
   `length` tokens. */
static inline size_t attend_floats(size_t queries, size_t length, size_t size) {
  return queries * (whole_depths(length) + padded(size) + 3 + whole_depths(size) / 2);
}

typedef struct {
  const char *name;
  /* Quantizes a row of x (k,) to row `row` of `to`; `scale` is a factor of all its numbers. */
  void (*quantize)(const float *x, size_t k, float scale, const Quantized *to, size_t row);
  /* Multiplies rows from `row` on with one or more groups of columns, `bytes` apart, plus their biases.
     Returns how many rows. */
  size_t (*int8_tile)(const Quantized *x, size_t row, const uint8_t *packed, size_t groups,
                      size_t bytes, const float *bias, float out[][MAX_ROWS][LINE]);
  size_t (*float_tile)(const float *x, size_t count, size_t stride, size_t k, const float *packed,
                       const float *bias, float out[][LINE]);
  void (*coarsen)(const float *x, size_t k, float scale, const Coarse *to, size_t row);
  /* Adds the products of rows [row, row + count) with a group of columns in `bits` bits to out. */
  void (*add_rest)(const Coarse *x, size_t row, size_t count, const uint8_t *packed, int bits,
                   float out[][LINE]);
  /* Adds the product of one row (k,) with a group of columns, of fp16 if `half`, to y (LINE,). */
  void (*add_product)(int half, const float *x, size_t k, const void *packed, float *y);
  void (*gelu)(float *x, size_t count, int tanh_form); /* in place */
  void (*layer_norm)(const float *x, size_t units, Norm norm, float epsilon, float *y);
  float (*rms_scale)(const float *x, size_t units, float epsilon);
  void (*rotate)(float *x, size_t n, size_t width);
  /* Writes one token's keys and values of one head to slot `slot` of a page, in int8 or fp32. */
  void (*store_kv)(int int8, const float *k, const float *v, size_t size, size_t slot, void *keys,
                   void *values);
  /* Computes attention of at most `left` queries, from number `first` on. Returns how many. */
  size_t (*attend)(const Queries *queries, size_t first, size_t left, float *scores, float *out);
  double (*weigh)(const float *logits, size_t count, float temperature, float *weights);
  size_t groups;     /* groups of columns that int8_tile multiplies at once, at most */
  size_t tiles_from; /* the least number of rows for which int8_tile uses tile registers */
  void (*end_tiles)(void); /* a thread calls it, unless it is NULL, after its last products */
} Kernels;

extern const Kernels *kernels;

#endif
