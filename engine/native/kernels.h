/* The functions that a pass is made of, for one set of instructions, see kernels.c. */

#ifndef KERNELS_H
#define KERNELS_H

#include "pass.h"

enum {
  BESIDE = 4,      /* vectors whose numbers lie beside each other */
  MAX_BLOCK = 64,  /* numbers that share a scale */
  MAX_ROWS = 16,   /* rows, or vectors, of a tile */
  MAX_QUERIES = 12, /* queries of one row and head that attention computes at once */
  FEW_QUERIES = 4   /* with so many queries of a row or fewer, it computes several heads at once */
};

/* Rows of floats, quantized: each is `planes` vectors of int8 numbers, the upper plane first. BESIDE
   vectors are interleaved, four numbers of each in turn. For kernels with tiles they are not: a block of
   MAX_ROWS vectors, one after the other, is followed by the next block of these vectors. */
typedef struct {
  size_t count, planes, width, blocks, block; /* width: numbers of a row, whole blocks */
  size_t beside;  /* BESIDE, or 1 for kernels with tiles */
  int32_t *fours; /* (count * planes / BESIDE, width / 4, BESIDE), each four numbers; or else
                     (count * planes / MAX_ROWS, blocks, MAX_ROWS, block / 4) */
  float *scales;  /* (count * planes / BESIDE, blocks, BESIDE) */
  int32_t *sums;  /* as scales: what a kernel adds for the 128 that weights are stored with */
} Quantized;

/* The input of attention for one row and `heads` adjacent heads. pages[i]: the first head's keys on the
   row's i-th page; the other heads' keys follow, see pass.c. */
typedef struct {
  const float *q; /* (count, stride) */
  const uint8_t *const *pages;
  size_t heads, size;   /* size: of a head */
  size_t values;        /* numbers from a head's keys to its values */
  size_t stride, out_stride;
  size_t position; /* of the first query */
  float scale;
  int half; /* keys and values in fp16, else fp32 */
} Queries;

typedef struct {
  const char *name;
  /* Quantizes a block of at most MAX_BLOCK numbers to `planes` planes of int8, see Quantized. */
  void (*quantize)(const float *x, size_t block, size_t planes, size_t beside,
                   int32_t *const to[2], float *scale, int32_t sums[2]);
  /* Multiplies rows from `row` on with a group of columns, plus its bias. Returns how many rows. */
  size_t (*int8_tile)(const Quantized *x, size_t row, const uint8_t *packed, const float *bias,
                      float out[][LINE]);
  size_t (*float_tile)(const float *x, size_t count, size_t stride, size_t k, const float *packed,
                       const float *bias, float out[][LINE]);
  /* Adds the product of one row (k,) with a group of columns, of fp16 if `half`, to y (LINE,). */
  void (*add_product)(int half, const float *x, size_t k, const void *packed, float *y);
  void (*gelu)(float *x, size_t count, int tanh_form); /* in place */
  void (*layer_norm)(const float *x, size_t units, Norm norm, float epsilon, float *y);
  /* Writes one token's keys and values of one head to slot `slot` of a page, in fp16 or fp32. */
  void (*store_kv)(int half, const float *k, const float *v, size_t size, size_t slot, void *keys,
                   void *values);
  /* Computes attention of at most `left` queries, from number `first` on. Returns how many. */
  size_t (*attend)(const Queries *queries, size_t first, size_t left, float *scores, float *out);
  double (*weigh)(const float *logits, size_t count, float temperature, float *weights);
  /* The least number of vectors for which int8_tile uses tile registers; these are not interleaved.
     A thread calls end_tiles, unless it is NULL, after its last products. */
  size_t tiles_from;
  void (*end_tiles)(void);
} Kernels;

extern const Kernels *kernels;

#endif
