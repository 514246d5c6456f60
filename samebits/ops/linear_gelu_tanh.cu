// GELU of a linear, in one kernel: z = round(x w^T + bias), the library's product, then y = GELU(z) in its tanh form, rounded.
//
// The product is _product.cuh's, the GELU that of gelu_tanh.cu by table: for every bf16 z the same bits as the formula's.
//
// Macros: CLUSTER, SIDE_BY_SIDE, GROUP as in _product.cuh.

#define WEIGHTS 1
#define BIAS 1
#include "_product.cuh"
#include "_gelu_table.cuh"

struct Gelu {
  const float* table;
  __device__ __forceinline__ void finish(Half* eight) const {
    Vector<Half, 8> v = load<Half, 8>(eight);
#pragma unroll
    for (int k = 0; k < 4; k++) v.pair[k] = gelu_by_table(table, v.pair[k]);
    store_shared(eight, v);
  }
};

// grid (blocks), as many as run at once; block (PRODUCT_THREADS)
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(PRODUCT_THREADS, 1)
linear_gelu_tanh(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap y,
                 const __nv_bfloat16* __restrict__ bias, int rows, int columns, int width) {
  extern __shared__ unsigned char raw[];
  Shared& shared = shared_memory(raw);
  float* table = reinterpret_cast<float*>(&shared + 1);
  fill_gates(table, threadIdx.x, PRODUCT_THREADS);
  multiply_matrices(shared, x, weight, weight, y, bias, rows, columns, width, Gelu{table});
}
