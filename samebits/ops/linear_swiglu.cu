// SwiGLU of two linears, in one kernel: a = round(x g^T) and b = round(x u^T), the library's products, then s = round(silu(a)) and
// y = round(s * b), which are two eager kernels.
//
// Macros: CLUSTER, SIDE_BY_SIDE, GROUP as in _product.cuh.

#define WEIGHTS 2
#define BIAS 0
#include "_product.cuh"

struct SwiGlu {
  __device__ __forceinline__ void finish(Half* eight) const {
    Vector<Half, 8> a = load<Half, 8>(eight);
    const Vector<Half, 8> b = load<Half, 8>(eight + HALF_TILE / 2);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float2 f = widen(a.pair[k]);
      a.pair[k] = product(round_pair<Half>(silu(f.x), silu(f.y)), b.pair[k]);
    }
    store_shared(eight, a);
  }
};

// grid (blocks), as many as run at once; block (PRODUCT_THREADS)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(PRODUCT_THREADS, 1)
linear_swiglu(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap gate_weight,
              const __grid_constant__ TensorMap up_weight, const __grid_constant__ TensorMap y, int rows, int columns, int width) {
  extern __shared__ unsigned char raw[];
  multiply_matrices(shared_memory(raw), x, gate_weight, up_weight, y, nullptr, rows, columns, width, SwiGlu{});
}
