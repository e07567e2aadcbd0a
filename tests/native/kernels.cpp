// Runs plans as a GPU would: every thread block a thread of its own, windows and epochs handled by the kernel itself.
// kernels PLANS RANKS SEED STEPS. Compiled together with the native core, all of it with CR_SPIN=1.
#include "../../algorithms/device/run_plan.h"
#include "../../commrt/_native/engine.h"
#include "harness.h"

using namespace commrt;

namespace {

typedef void (*Kernel)(const Launch*, u32 block);
template <class T, class Op> void kernel(const Launch* launch, u32 block) { run_plan<DeviceMath<T, Op>>(launch, block); }

template <class T> Kernel kernel_for(unsigned reduction) {
  static const Kernel kernels[] = {kernel<T, Sum>, kernel<T, Prod>, kernel<T, Min>, kernel<T, Max>, kernel<T, Sum>};
  return kernels[reduction];
}
Kernel kernel_of(const Step& s) {
  if (s.dtype == UINT8) return kernel_for<u8>(s.reduction);
  if (s.dtype == INT32) return kernel_for<i32>(s.reduction);
  if (s.dtype == INT64) return kernel_for<i64>(s.reduction);
  return s.dtype == FLOAT32 ? kernel_for<float>(s.reduction) : kernel_for<double>(s.reduction);
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
    Step s = random_step(plans[which], common, 160 << 10);
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

// One rank calls for another count: every grid ends, and says why or was stopped.
void disagree(const WholePlan& p, unsigned ranks) {
  World world({ranks, 96 << 10, 32 << 10, false, false});
  world.run([&](Rank& rank) {
    cr_lane* lane = cr_comm_collectives(rank.comm);
    cr_program* program = make_program(lane, p.programs[rank.rank]);
    Step s{};
    s.collective = p.collective, s.dtype = INT32, s.ranks = ranks, s.count = rank.rank ? 100 : 101;
    Buffers buffers(s, rank, rank.rank, 0);
    cr_call call = buffers.call(program);
    cr_launch w{};
    int code = CR_OK;
    world.meeting.wait();
    CHECK(prepare(*lane, call, w, code), "prepare answers %d", code);
    launch_grid(kernel_of(s), w.launch);
    CHECK((u32)lane->lane.failure == MISMATCH, "%s, rank %u: failure %llx", p.name.c_str(), rank.rank, lane->lane.failure);
    CHECK(!lane->lane.control->completed, "%s: rank %u says that it completed", p.name.c_str(), rank.rank);
    launch_grid(kernel_of(s), w.launch);   // an aborted communicator's kernels end at once
    world.meeting.wait();
  });
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
    if (p.collective == ALL_REDUCE_ && !p.needs && p.name != "all_reduce/switch") disagree(p, ranks);
  printf("kernels: %u ranks, seed %llu, %zu plans: all right\n", ranks, seed, plans.size());
  return 0;
}
