/* Int8MatMul, an operator of matmul.c's product for onnxruntime.

       x         (..., K) float
       packed    (bytes,) uint8, as matmul.c has it
       bias      (N,) float, optional
       residual  (..., N) float, optional
       y         (..., N) float: x W^T + bias + residual
       N, block_size  attributes

   A wheel of onnxruntime brings no header. What is used of its C API is declared here: a struct of
   functions whose places never change, since it is only ever appended to.
   https://github.com/microsoft/onnxruntime/blob/main/include/onnxruntime/core/session/onnxruntime_c_api.h */

#include "matmul.h"

#include <stdlib.h>
#include <string.h>

enum { API_VERSION = 17 }; /* the first with KernelContext_ParallelFor */
enum { FAIL = 1 };         /* OrtErrorCode */
enum { FLOAT = 1, UINT8 = 2 };
enum { REQUIRED, OPTIONAL };

typedef struct Status Status; /* NULL: it went well */
typedef struct Context Context;
typedef struct Value Value;
typedef struct Info Info;
typedef struct Shape Shape;
typedef struct Domain Domain;
typedef struct Options Options;
typedef struct Operator Operator;
typedef void (*Function)(void);

typedef struct { Function at[275]; } Api;
typedef struct {
  const Api *(*get_api)(uint32_t version);
  const char *(*get_version)(void);
} ApiBase;

#define CALL(api, place, type) ((type)(api)->at[place])
#define CREATE_STATUS(api) CALL(api, 0, Status *(*)(int, const char *))
#define CREATE_DOMAIN(api) CALL(api, 26, Status *(*)(const char *, Domain **))
#define ADD_OPERATOR(api) CALL(api, 27, Status *(*)(Domain *, const Operator *))
#define ADD_DOMAIN(api) CALL(api, 28, Status *(*)(Options *, Domain *))
#define DATA(api) CALL(api, 51, Status *(*)(const Value *, void **))
#define COUNT_DIMENSIONS(api) CALL(api, 61, Status *(*)(const Shape *, size_t *))
#define DIMENSIONS(api) CALL(api, 62, Status *(*)(const Shape *, int64_t *, size_t))
#define SHAPE(api) CALL(api, 65, Status *(*)(const Value *, Shape **))
#define ATTRIBUTE(api) CALL(api, 86, Status *(*)(const Info *, const char *, int64_t *))
#define COUNT_INPUTS(api) CALL(api, 88, Status *(*)(const Context *, size_t *))
#define INPUT(api) CALL(api, 90, Status *(*)(const Context *, size_t, const Value **))
#define OUTPUT(api) \
  CALL(api, 91, Status *(*)(Context *, size_t, const int64_t *, size_t, Value **))
#define RELEASE_SHAPE(api) CALL(api, 99, void (*)(Shape *))
#define IN_PARALLEL(api) \
  CALL(api, 274, Status *(*)(const Context *, void (*)(void *, size_t), size_t, size_t, void *))

#define TRY(call)                   \
  do {                              \
    Status *status = (call);        \
    if (status) return status;      \
  } while (0)

/* As OrtCustomOp begins, up to what this version of it may leave out. */
struct Operator {
  uint32_t version;
  void *(*create)(const Operator *, const Api *, const Info *);
  const char *(*name)(const Operator *);
  const char *(*provider)(const Operator *);
  int (*input_type)(const Operator *, size_t);
  size_t (*inputs)(const Operator *);
  int (*output_type)(const Operator *, size_t);
  size_t (*outputs)(const Operator *);
  void (*compute)(void *, Context *);
  void (*destroy)(void *);
  int (*input_characteristic)(const Operator *, size_t);
  int (*output_characteristic)(const Operator *, size_t);
  int (*input_memory)(const Operator *, size_t);
  Function variadic[4];
  Status *(*create_v2)(const Operator *, const Api *, const Info *, void **);
  Status *(*compute_v2)(void *, Context *);
  Status *(*infer_shape)(const Operator *, void *);
  Function rest[6];
};

enum { X, PACKED, BIAS, RESIDUAL, INPUTS };
enum { MOST_DIMENSIONS = 8, GROUPS = 8, ROWS = 16 }; /* the last two at once */

typedef struct {
  const Api *api;
  int64_t n, block;
} Kernel;

typedef struct {
  const Rows *rows;
  const float *x;
  size_t k;
  Product product;
} Work;

static void quantize(void *data, size_t part) {
  const Work *work = data;
  for (size_t row = part * ROWS; row < (part + 1) * ROWS && row < work->rows->count; row++)
    quantize_row(work->rows, row, work->x, work->k);
}

static void multiply(void *data, size_t part) {
  const Work *work = data;
  const size_t end = (part + 1) * GROUPS;
  for (size_t group = part * GROUPS; group < end && group * COLUMNS < work->product.n; group++)
    multiply_group(work->rows, group, &work->product);
}

typedef struct {
  int64_t dims[MOST_DIMENSIONS];
  size_t count, numbers;
} Dimensions;

static Status *dimensions(const Api *api, const Value *value, Dimensions *found) {
  Shape *shape;
  TRY(SHAPE(api)(value, &shape));
  Status *status = COUNT_DIMENSIONS(api)(shape, &found->count);
  if (!status && found->count > MOST_DIMENSIONS)
    status = CREATE_STATUS(api)(FAIL, "Int8MatMul: more than 8 dimensions");
  if (!status) status = DIMENSIONS(api)(shape, found->dims, found->count);
  RELEASE_SHAPE(api)(shape);
  found->numbers = 1;
  for (size_t i = 0; !status && i < found->count; i++) found->numbers *= (size_t)found->dims[i];
  return status;
}

static size_t parts(size_t all, size_t at_once) { return (all + at_once - 1) / at_once; }

static Status *compute(void *data, Context *context) {
  const Kernel *kernel = data;
  const Api *api = kernel->api;
  const size_t n = (size_t)kernel->n, block = (size_t)kernel->block;
  Dimensions sizes[INPUTS] = {0};
  void *inputs[INPUTS] = {0};
  size_t given;
  TRY(COUNT_INPUTS(api)(context, &given));
  for (size_t i = 0; i < given && i < INPUTS; i++) {
    const Value *value;
    TRY(INPUT(api)(context, i, &value));
    if (!value) continue;
    TRY(DATA(api)(value, &inputs[i]));
    TRY(dimensions(api, value, &sizes[i]));
  }

  Dimensions *x = &sizes[X];
  if (!x->count) return CREATE_STATUS(api)(FAIL, "Int8MatMul: x is one number");
  const size_t k = (size_t)x->dims[x->count - 1], rows = k ? x->numbers / k : 0;
  if (sizes[PACKED].numbers != packed_bytes(n, k, block))
    return CREATE_STATUS(api)(FAIL, "Int8MatMul: packed is not of N and x's last dimension");
  if ((inputs[BIAS] && sizes[BIAS].numbers != n) ||
      (inputs[RESIDUAL] && sizes[RESIDUAL].numbers != rows * n))
    return CREATE_STATUS(api)(FAIL, "Int8MatMul: bias or residual is not of y's size");
  x->dims[x->count - 1] = kernel->n;
  Value *output;
  void *y;
  TRY(OUTPUT(api)(context, 0, x->dims, x->count, &output));
  TRY(DATA(api)((const Value *)output, &y));
  if (!rows) return NULL;

  void *memory = malloc(rows_bytes(rows, k, block));
  if (!memory) return CREATE_STATUS(api)(FAIL, "Int8MatMul: out of memory");
  const Rows quantized = rows_in(memory, rows, k, block);
  Work work = {&quantized, inputs[X], k, {inputs[PACKED], inputs[BIAS], inputs[RESIDUAL], y, n}};
  Status *status = NULL;
  if (rows <= ROWS)
    quantize(&work, 0);
  else
    status = IN_PARALLEL(api)(context, quantize, parts(rows, ROWS), 0, &work);
  if (!status)
    status = IN_PARALLEL(api)(context, multiply, parts(parts(n, COLUMNS), GROUPS), 0, &work);
  free(memory);
  return status;
}

static Status *create(const Operator *self, const Api *api, const Info *info, void **made) {
  (void)self;
  Kernel found = {api, 0, 0};
  TRY(ATTRIBUTE(api)(info, "N", &found.n));
  TRY(ATTRIBUTE(api)(info, "block_size", &found.block));
  if (found.n < 1 || found.block < 4 || found.block % 4 || found.block > MOST_BLOCK)
    return CREATE_STATUS(api)(FAIL, "Int8MatMul: N or block_size");
  Kernel *kernel = *made = malloc(sizeof found);
  if (!kernel) return CREATE_STATUS(api)(FAIL, "Int8MatMul: out of memory");
  *kernel = found;
  return NULL;
}

static const char *name(const Operator *self) { return (void)self, "Int8MatMul"; }
static const char *provider(const Operator *self) { return (void)self, (const char *)NULL; }
static int input_type(const Operator *self, size_t i) { return (void)self, i == PACKED ? UINT8 : FLOAT; }
static int output_type(const Operator *self, size_t i) { return (void)self, (void)i, FLOAT; }
static size_t inputs(const Operator *self) { return (void)self, INPUTS; }
static size_t outputs(const Operator *self) { return (void)self, 1; }
static int characteristic(const Operator *self, size_t i) {
  return (void)self, i >= BIAS ? OPTIONAL : REQUIRED;
}
static int on_cpu(const Operator *self, size_t i) { return (void)self, (void)i, 0; }

static const Operator int8_matmul = {
    .version = API_VERSION,
    .name = name,
    .provider = provider,
    .input_type = input_type,
    .inputs = inputs,
    .output_type = output_type,
    .outputs = outputs,
    .destroy = free,
    .input_characteristic = characteristic,
    .output_characteristic = characteristic,
    .input_memory = on_cpu,
    .create_v2 = create,
    .compute_v2 = compute,
};

/* Found by its name when the library is given to a session's options. */
Status *RegisterCustomOps(Options *options, const ApiBase *base) {
  static Domain *domain; /* onnxruntime does not copy it */
  const Api *api = base->get_api(API_VERSION);
  if (!domain) {
    use_kernels(NULL);
    TRY(CREATE_DOMAIN(api)("kogpt2", &domain));
    TRY(ADD_OPERATOR(api)(domain, &int8_matmul));
  }
  return ADD_DOMAIN(api)(options, domain);
}
