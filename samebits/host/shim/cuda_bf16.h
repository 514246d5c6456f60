// Stands in for the CUDA header of this name; prelude.h has brought everything.
#pragma once
#include "halves.h"
