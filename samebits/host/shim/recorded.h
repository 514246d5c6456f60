// The functions that the GPU's hardware approximates (and those that its library builds on them): here the correctly
// rounded value of the host's library, unless pairs of input and output bits recorded on a GPU were handed in.
#pragma once

namespace samebits {
enum class Approximate { rsqrtf, expf, tanhf, erff };
float approximate(Approximate function, float value);
}  // namespace samebits
