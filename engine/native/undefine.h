/* Undefines the macros that kernels.c defines for one set of instructions. */
#undef TARGET
#undef NAME
#undef LANES
#undef PARTS
#undef FMA
#undef MULTIPLY_ADD
#undef MULTIPLY_BYTES
#undef SUMS
#undef PLANES
#undef WEIGHT_OFFSET
#undef LOAD_HALVES
#undef PLAIN_HALVES
#undef LOWER
#undef HIGHER
#undef floats
#undef ints
#undef uints
