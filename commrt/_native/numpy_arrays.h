#pragma once
#include "comm.h"

namespace commrt {

// A blocking call on two of numpy's arrays, by the addresses of their fields (behind the object's header); x may be out.
// Deadline and slice are those of cr_comm_patience. CR_UNFIT: nothing was done, the arrays need a closer look.
int run_on_arrays(cr_lane&, u32 collective, u32 reduction, u32 root, const void* x, const void* out, cr_launch** pending);
int run_barrier(cr_lane&, cr_launch** pending);

}  // namespace commrt
