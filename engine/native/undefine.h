/* Undefines the macros that kernels.c defines for one set of instructions. */
#undef TARGET
#undef NAME
#undef LANES
#undef PARTS
#undef FMA
#undef DOT
#undef WEIGHT_OFFSET
#undef LOAD_HALVES
#undef STORE_HALVES
#undef PLAIN_HALVES
#undef LOWER
#undef HIGHER
#undef floats
#undef ints
#undef bytes
