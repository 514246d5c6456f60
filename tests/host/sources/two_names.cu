// Two names for dynamic shared memory, which the host toolchain does not take.
extern "C" __global__ void two_names(int* out) {
  extern __shared__ int one[];
  extern __shared__ float other[];
  out[0] = one[0] + static_cast<int>(other[0]);
}
