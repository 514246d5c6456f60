// CUDA's vector types, with CUDA's alignments.
#pragma once

#define SAMEBITS_VECTORS(type, name, align2, align4)                                              \
  struct name##1 { type x; };                                                                     \
  struct alignas(align2) name##2 { type x, y; };                                                  \
  struct name##3 { type x, y, z; };                                                               \
  struct alignas(align4) name##4 { type x, y, z, w; };                                            \
  inline name##1 make_##name##1(type x) { return {x}; }                                           \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                     \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

SAMEBITS_VECTORS(signed char, char, 2, 4)
SAMEBITS_VECTORS(unsigned char, uchar, 2, 4)
SAMEBITS_VECTORS(short, short, 4, 8)
SAMEBITS_VECTORS(unsigned short, ushort, 4, 8)
SAMEBITS_VECTORS(int, int, 8, 16)
SAMEBITS_VECTORS(unsigned int, uint, 8, 16)
SAMEBITS_VECTORS(long long, longlong, 16, 16)
SAMEBITS_VECTORS(unsigned long long, ulonglong, 16, 16)
SAMEBITS_VECTORS(float, float, 8, 16)
SAMEBITS_VECTORS(double, double, 16, 16)
#undef SAMEBITS_VECTORS

struct dim3 {
  unsigned x, y, z;
};
