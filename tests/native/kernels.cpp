// Runs plans as a GPU would: every thread block a thread of its own, windows and epochs handled by the kernel itself.
// kernels PLANS RANKS SEED STEPS. Compiled with CR_SPIN=1, and linked with a native core whose cursors rest meanwhile.
#if defined(__x86_64__)
#include <sched.h>
#define __builtin_ia32_pause sched_yield  // far more blocks than processors here
#endif
#include "../../algorithms/device/run_plan.h"
#include "../../commrt/_native/engine.h"
#include "harness.h"

#include <atomic>

using namespace commrt;

namespace {

typedef void (*Kernel)(const Launch*, u32 block);
template <class T, class Op> void kernel(const Launch* launch, u32 block) { run_plan<DeviceMath<T, Op>>(launch, block); }

// A few pairs stand for all: only these are compiled.
Step reducible(Step s) {
  s.dtype = itemsize(s.dtype) > 1 ? FLOAT32 : UINT8;
  if (s.reduction == 1 || s.reduction == 3) s.reduction = 2;
  return s;
}
Kernel kernel_of(const Step& s) {
  if (s.dtype == UINT8) return s.reduction == 2 ? kernel<u8, Min> : kernel<u8, Sum>;
  return s.reduction == 2 ? kernel<float, Min> : kernel<float, Sum>;
}

// A grid: all of its blocks at once; the launch is over when they are.
void launch_grid(Kernel run, const Launch& launch) {
  std::vector<std::thread> blocks;
  for (u32 block = 0; block < launch.program->nblocks; block++) blocks.emplace_back(run, &launch, block);
  for (std::thread& block : blocks) block.join();
}

void run_steps(World& world, Rank& rank, const std::vector<WholePlan>& plans, u64 seed, u64 steps) {
  cr_lane* lane = cr_comm_collectives(rank.comm);
  std::vector<cr_program*> programs;
  for (const WholePlan& p : plans) programs.push_back(make_program(lane, p.programs[rank.rank]));
  world.meeting.wait();
  for (u64 step = 0; step < steps; step++) {
    Random common = random_of(seed, step), own = random_of(seed, step, rank.rank + 1);
    u64 which = step < plans.size() ? (step + seed) % plans.size() : common.below(plans.size());
    Step s = reducible(random_step(plans[which], common, 160 << 10));
    Buffers buffers(s, rank, rank.rank, place_in(step % 4, 4, own));
    dawdle(own);
    cr_launch w{};
    int code = CR_OK;
    cr_call call = buffers.call(programs[which]);
    CHECK(prepare(*lane, call, w, code), "prepare answers %d", code);
    launch_grid(kernel_of(s), w.launch);
    CHECK(!lane->lane.failure, "%s fails: %llx", plans[which].name.c_str(), lane->lane.failure);
    CHECK(lane->lane.control->completed == step + 1, "%s: operation %llu is not the last one", plans[which].name.c_str(), step + 1);
    buffers.check(plans[which].name.c_str());
  }
  world.meeting.wait();
}

// One rank calls for another count: some see it, and end; the host, here whoever has ended, stops the others.
void disagree(const WholePlan& p, unsigned ranks) {
  World world({ranks, 96 << 10, 32 << 10, false, false});
  std::atomic<u32> found{0};
  world.run([&](Rank& rank) {
    cr_lane* lane = cr_comm_collectives(rank.comm);
    cr_program* program = make_program(lane, p.programs[rank.rank]);
    Step s{};
    s.collective = p.collective, s.dtype = FLOAT32, s.ranks = ranks, s.count = rank.rank ? 100 : 101;
    Buffers buffers(s, rank, rank.rank, 0);
    cr_call call = buffers.call(program);
    cr_launch w{};
    int code = CR_OK;
    world.meeting.wait();
    CHECK(prepare(*lane, call, w, code), "prepare answers %d", code);
    launch_grid(kernel_of(s), w.launch);
    for (Rank& other : world.ranks) store_release(cr_comm_collectives(other.comm)->lane.abort, 1);
    found += (u32)lane->lane.failure == MISMATCH;
    CHECK(!lane->lane.control->completed, "%s: rank %u says that it completed", p.name.c_str(), rank.rank);
    launch_grid(kernel_of(s), w.launch);  // an aborted communicator's kernels end at once
    world.meeting.wait();
  });
  CHECK(found, "%s: no rank finds that they disagree", p.name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 5, "kernels PLANS RANKS SEED STEPS");
  unsigned ranks = (unsigned)atoi(argv[2]);
  u64 seed = strtoull(argv[3], nullptr, 10), steps = strtoull(argv[4], nullptr, 10);
  std::vector<WholePlan> plans;
  for (WholePlan& p : read_plans(argv[1], ranks))
    if (p.collective != SEND_ && !(p.needs & DIRECT_NEED)) plans.push_back(std::move(p));
  World world({ranks, seed & 2 ? 96ull << 10 : 384ull << 10, 32 << 10, (seed & 1) != 0, false, seed & 4 ? 0xffffffffull - 20 : 0});
  world.run([&](Rank& rank) { run_steps(world, rank, plans, seed, steps); });
  for (const WholePlan& p : plans)
    if (p.collective == ALL_REDUCE_ && !(p.needs & ~MAPPED_NEED)) disagree(p, ranks);
  printf("kernels: %u ranks, seed %llu, %zu plans: all right\n", ranks, seed, plans.size());
  return 0;
}
