// MXNet's operator of a pass: mx.nd.kogpt2_pass(model, call, arena, logits), see pass.h.
//
// Its inputs are arrays on existing memory: the Model, which points into its mapped file, a Call, the
// arena of keys and values, and the logits; the last three are written to. So MXNet orders passes after
// other operations on the same memory. The output is the PassStatus, which is also in the Call.

#include <mxnet/lib_api.h>

extern "C" {
#include "pass.h"
}

using mxnet::ext::MXReturnValue;
using mxnet::ext::MXTensor;
using Attributes = std::unordered_map<std::string, std::string>;

namespace {

struct Call {
  const Piece *pieces;
  size_t count;
  int32_t status;  // of the pass, when it is over
};

enum { MODEL, CALL, ARENA, LOGITS, NUM_INPUTS };

MXReturnValue parse_attributes(const Attributes &, int *num_inputs, int *num_outputs) {
  *num_inputs = NUM_INPUTS;
  *num_outputs = 1;
  return mxnet::ext::MX_SUCCESS;
}

MXReturnValue infer_type(const Attributes &, std::vector<int> *, std::vector<int> *outputs) {
  (*outputs)[0] = mxnet::ext::kInt32;
  return mxnet::ext::MX_SUCCESS;
}

MXReturnValue infer_shape(const Attributes &, std::vector<std::vector<unsigned>> *,
                          std::vector<std::vector<unsigned>> *outputs) {
  (*outputs)[0] = {1};
  return mxnet::ext::MX_SUCCESS;
}

MXReturnValue mutate_inputs(const Attributes &, std::vector<int> *indices) {
  *indices = {CALL, ARENA, LOGITS};
  return mxnet::ext::MX_SUCCESS;
}

MXReturnValue forward(const Attributes &, std::vector<MXTensor> *inputs,
                      std::vector<MXTensor> *outputs, const mxnet::ext::OpResource &) {
  std::vector<MXTensor> &in = *inputs;
  Call *call = in[CALL].data<Call>();
  call->status = run_pass(in[MODEL].data<Model>(), in[ARENA].data<uint8_t>(), call->pieces,
                          call->count, in[LOGITS].data<float>());
  *(*outputs)[0].data<int32_t>() = call->status;
  return mxnet::ext::MX_SUCCESS;
}

}  // namespace

REGISTER_OP(kogpt2_pass)
    .setForward(forward, "cpu")
    .setParseAttrs(parse_attributes)
    .setInferType(infer_type)
    .setInferShape(infer_shape)
    .setMutateInputs(mutate_inputs);

MXReturnValue initialize(int version) {
  return version >= 10700 ? mxnet::ext::MX_SUCCESS : mxnet::ext::MX_FAIL;
}
