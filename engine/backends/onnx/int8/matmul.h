/* Products of floats with int8 weights that are packed in groups of columns, see matmul.c. */

#include <stddef.h>
#include <stdint.h>

#define COLUMNS 16 /* of a group */

#define BESIDE 4   /* rows of x whose numbers lie beside each other */
#define MOST_BLOCK 64

/* `count` rows of `width` numbers of x, quantized. The last rows may be less than BESIDE. */
typedef struct {
  size_t count, width, blocks, block;
  int32_t *fours; /* (count / BESIDE, width / 4, BESIDE), each four numbers */
  float *scales;  /* (count / BESIDE, blocks, BESIDE) */
  int32_t *sums;  /* as scales */
} Rows;

/* Computes by the instructions of this name from now on, or by the best of this processor's where it is
   NULL. Returns the name, or NULL where the processor has not got them. */
const char *use_kernels(const char *wanted);
/* What `count` rows of `k` floats take, quantized in blocks of `block`: to be aligned as floats are. */
size_t rows_bytes(size_t count, size_t k, size_t block);
/* Rows in that memory, with nothing in them yet. */
Rows rows_in(void *memory, size_t count, size_t k, size_t block);
/* What n columns of k numbers take, packed. */
size_t packed_bytes(size_t n, size_t k, size_t block);
/* Quantizes row `row` of x (count, k). */
void quantize_row(const Rows *rows, size_t row, const float *x, size_t k);
/* y (count, n) = x W^T + bias (n,) + residual (count, n), of which the last two may be NULL. */
typedef struct {
  const uint8_t *packed;
  const float *bias, *residual;
  float *y;
  size_t n;
} Product;

/* Columns of group `group`. */
void multiply_group(const Rows *rows, size_t group, const Product *product);
