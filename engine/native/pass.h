/* A GPT-2 pass on a CPU: the library's interface, see pass.c.

   Every row of floats has its length rounded up to LINE numbers, with zeros behind the last, and so
   has every vector of a model: loops over them have no tail. */

#ifndef PASS_H
#define PASS_H

#include <stddef.h>
#include <stdint.h>

#define LINE 16 /* floats of a cache line; columns of a group of a packed matrix */

enum { PAGE_TOKENS = 16 }; /* tokens of a page of keys and values */

static inline size_t padded(size_t count) { return (count + LINE - 1) / LINE * LINE; }

typedef struct {
  const void *weight; /* packed, see product.h */
  const float *bias;
} Matrix;

typedef struct {
  const float *gamma, *beta;
} Norm;

/* In int8 a layer is in the rotated basis of engine/native/rotation.py: gamma and beta of its norms are in
   the matrices behind them, and the vectors are NULL. */
typedef struct {
  Norm attention_norm;
  Matrix qkv, attention_out;
  Norm ffn_norm;
  Matrix ffn_hidden, ffn_out;
  float attention_scale; /* of the products of queries and keys, before the softmax */
} Layer;

/* One model: sizes, and pointers into its mapped file. `embedding` and `head` are packed matrices of
   (vocab, units), the same one where they are tied. */
typedef struct {
  int32_t num_layers, units, heads, hidden, vocab, max_length;
  int32_t int8;      /* 0: weights, keys and values in fp32 */
  int32_t gelu_tanh; /* 0: the exact form, by erf */
  float epsilon;     /* of LayerNorm */
  const Layer *layers;
  Norm final_norm;
  const void *embedding;
  const float *positions; /* (max_length, padded units) */
  Matrix head;
} Model;

/* What an adapter adds to a product: up(down(x) + down_bias), of low rank; rest(x), whose weights have a
   few bits; and a bias. The matrices of low rank are packed as those of a model in fp32, with halves
   instead of floats if the model is in int8; the rest is for models in int8 alone, see product.h. */
typedef struct {
  const void *down;       /* (rank, k) */
  const void *up;         /* (n, rank) */
  const float *down_bias; /* (padded rank,) or NULL */
  const void *rest;       /* (n, k) */
  const float *bias;      /* (padded n,) or NULL */
  int32_t rank, bits;     /* 0: there is no `up`, no `rest` */
} Change;

typedef struct {
  Change qkv, attention_out, ffn_hidden, ffn_out;
} AdapterLayer;

/* The difference of a fine-tune from its base: that of LoRA, in some products of the layers, or that of a
   whole fine-tune, in all weights. `down` of the embedding is (units, rank), because its rows are looked
   up. A fine-tune may have more tokens than its base, with rows of their own, packed as `up` is. */
typedef struct {
  const AdapterLayer *layers; /* as many as the model's */
  Change embedding, head;
  const void *more_embedding, *more_head; /* (more, units): of the tokens from the model's vocab on */
  int32_t more;
  const uint16_t *positions; /* (max_length, padded units) in fp16; NULL: the model's */
  Norm final_norm;           /* NULL: the model's */
} Adapter;

/* Tokens of one row that follow each other. The row's keys and values up to `position` are in its
   pages; those of the new tokens are written there. */
typedef struct {
  const int32_t *ids;   /* (count,) */
  const int32_t *pages; /* numbers of the row's pages, the first of its tokens first */
  int32_t count, position;
  int32_t num_logits; /* for how many of its last tokens logits are computed */
  const Adapter *adapter; /* NULL: none */
  float *states; /* NULL, or (num_logits, padded units): gets what the last LayerNorm gives, not logits */
} Piece;

typedef enum { PASS_OK, PASS_BAD_MODEL, PASS_BAD_PIECE, PASS_NO_MEMORY } PassStatus;

/* Computes `pieces` of one model, each of another row. Writes the logits that the pieces require, in
   order, as rows of padded(vocab + the most that an adapter has more) floats. `arena` is where page 0
   begins. One call at a time. */
PassStatus run_pass(const Model *model, uint8_t *arena, const Piece *pieces, size_t num_pieces,
                    float *logits);

/* Bytes of a page: PAGE_TOKENS tokens of all layers. */
size_t page_bytes(const Model *model);
/* Bytes that run_pass needs for `count` tokens, `wanted` of them with logits, of rows of at most
   `length` tokens, with adapters of at most `rank` and, if `has_rest`, of few bits. It reuses them until
   release_scratch. */
size_t scratch_bytes(const Model *model, size_t count, size_t wanted, size_t length, size_t rank,
                     int has_rest);
void release_scratch(void);

/* Uses `count` threads from the next pass on, the calling one among them. Returns how many there are:
   fewer where the system starts no more. */
int use_threads(int count);

/* Uses the kernels of this name from the next pass on: "amx", "vnni", "avx2", "neon" or "plain"; NULL:
   the processor's best. Returns the name, or NULL where the processor lacks them. */
const char *use_kernels(const char *name);

/* Bytes of n columns of k numbers, packed in int8 or fp32. */
size_t packed_bytes(size_t n, size_t k, int int8);

typedef enum { SOURCE_FLOAT32, SOURCE_FLOAT16, SOURCE_BFLOAT16, SOURCE_FLOAT64 } SourceType;

/* Packs a matrix: number i of its column c lies at source[c * column_stride + i * stride], strides in
   numbers. Several threads may pack groups of columns as matrices of their own. */
void pack(const void *source, SourceType type, size_t column_stride, size_t stride, size_t n,
          size_t k, int int8, uint8_t *packed);

/* Bytes of n columns of k numbers in `bits` bits, see product.h. */
size_t rest_bytes(size_t n, size_t k, int bits);

/* Packs a matrix (n, k) in 1, 2 or 3 bits. */
void pack_rest(const float *source, size_t n, size_t k, int bits, uint8_t *packed);

/* Writes the numbers of a matrix that is packed in int8, as (n, k). */
void unpack_int8(const uint8_t *packed, size_t n, size_t k, float *numbers);

/* Multiplies each of x (count, n, width) with the orthogonal matrix (n, n) of attention.h, which is its own
   inverse. The result is the same, bit for bit, on every processor. */
void rotate(float *x, size_t count, size_t n, size_t width);

/* Adds to out (n,) the products of W (n, k) with x (k,), summed in order. */
void add_products(const float *w, const float *x, size_t n, size_t k, float *out);

/* For sampling: writes the weights exp((logits[i] - largest) / temperature), returns their sum. */
double softmax_weights(const float *logits, size_t count, float temperature, float *weights);

/* Writes the k > 0 tokens with the largest logits (of equal ones the first, never NaN), in no order.
   Returns how many. `tokens` and `scratch` have space for `count`. */
size_t largest_tokens(const float *logits, size_t count, size_t k, int32_t *tokens, float *scratch);

/* The tokens that one is drawn from: the `top_k` likeliest tokens (0: all), of these the fewest that
   together have `top_p` of their probability, of these the ones with at least `min_p` times the largest
   probability, and of these the fewest typical ones that together have `typical_p` (Meister et al. 2022,
   "Locally Typical Sampling", https://arxiv.org/abs/2202.00666, section 4). */
typedef struct {
  double top_p, typical_p;
  float temperature, min_p;
  size_t top_k;
} Truncation;

/* Draws a token after truncation; `uniform` in [0, 1) is random. `scratch` has 12 * count bytes. */
int32_t draw_token(const float *logits, size_t count, const Truncation *how, double uniform,
                   void *scratch);

/* For constrained decoding. Token i is in a mask where bit i % 32 of word i / 32 is set; no bit from
   `count` on is.
   Copies the logits of the tokens in a mask, in order, and writes which tokens they are. Returns how
   many. */
size_t allowed_logits(const float *logits, const uint32_t *mask, size_t count, float *values,
                      int32_t *tokens);
/* The token with the largest logit of those in a mask, of equal ones the first; -1: none is. */
int32_t allowed_argmax(const float *logits, const uint32_t *mask, size_t count);
/* Clears the bits of a mask's last word from `count` on. Returns the only token in the mask; -1: there is
   none, -2: there are several. */
int32_t only_allowed(uint32_t *mask, size_t count);

/* A mapped file, or a part of it that begins and ends with a page. */
typedef struct {
  void *next; /* for the library */
  void *begin;
  size_t size;
  int32_t lost; /* 1: a page could not be read, so all are zeros, and results of it are wrong */
} Mapping;

/* From `guard` to `end_guard`, which come once, a page of the mapping that cannot be read, because the file
   was cut off or the disk fails, makes it `lost`, which would raise SIGBUS otherwise. */
void guard(Mapping *mapping);
void end_guard(Mapping *mapping);

/* Seconds that passes took since the last call, by part: embedding, products, attention, the rest,
   head. For profiles. */
void take_times(double times[5]);

#endif
