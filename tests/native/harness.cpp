// Runs the native core with ranks as threads, for the sanitizers: harness MODE PLANS RANKS SEED STEPS.
//   plans    blocking collectives in a random order, an engine a rank
//   shared   the same, one engine for all ranks
//   scratch  the same, of plans that leave data in scratch and go on
//   threads  collectives from two threads, sends and receives from two more, and the progress thread; asynchronously
//   trouble  abort, disagreement, a rank that never comes
//   streams, stream-threads, stream-trouble  the same over sockets, of plans that links which map nothing can carry
// 0: every result was right. 1: one was wrong. The sanitizer's own code: it found something.
#include <atomic>
#include <deque>

#include "harness.h"

namespace {

constexpr double TIMEOUT_S = 60;

struct Job {
  const char* plans;
  unsigned ranks;
  u64 seed, steps;
  bool streams;
};

bool leaves_scratch(const WholePlan& p) { return !p.programs[0].plan.synchronising && p.programs[0].plan.scratch_slots; }

std::vector<WholePlan> some_of(const std::vector<WholePlan>& plans, bool (*wanted)(const WholePlan&)) {
  std::vector<WholePlan> some;
  for (const WholePlan& p : plans)
    if (wanted(p)) some.push_back(p);
  return some;
}

Options options_of(const Job& job, bool one_engine, bool small = false) {
  Options o{};
  o.ranks = job.ranks;
  o.scratch_half = small || job.seed & 2 ? 96 << 10 : 768 << 10;
  o.packets_half = 32 << 10;
  o.memory_file = job.seed & 1;
  o.one_engine = one_engine;
  o.streams = job.streams;
  o.epoch = job.seed & 4 ? 0xffffffffull - 20 : 0;
  return o;
}

// A launch of one rank, with the buffers that must outlive it.
struct Flight {
  const char* name;
  Buffers buffers;
  cr_launch* launch = nullptr;

  Flight(const char* n, const Step& s, Rank& rank, unsigned place, u64 offset) : name(n), buffers(s, rank, place, offset) {}
  void start(cr_lane* lane, cr_program* program) {
    cr_call call = buffers.call(program);
    int code = cr_start(lane, &call, TIMEOUT_S, &launch);
    CHECK(code == CR_OK, "%s: cr_start answers %d", name, code);
  }
  void finish(bool poll) {
    int code = CR_PENDING;
    while (code == CR_PENDING) {
      code = poll ? cr_poll(launch) : cr_wait(launch, 0.05);
      if (poll && code == CR_PENDING) std::this_thread::yield();
    }
    cr_release(launch);
    CHECK(code == CR_OK, "%s: ends with %d", name, code);
    buffers.check(name);
  }
};

int run_blocking(cr_lane* lane, const cr_call& call, double timeout_s) {
  cr_launch* pending = nullptr;
  int code = cr_run(lane, &call, timeout_s, 0.02, &pending);
  if (code != CR_PENDING) return code;
  while (code == CR_PENDING) code = cr_wait(pending, 0.02);
  cr_release(pending);
  return code;
}

std::vector<cr_program*> programs_of(const std::vector<WholePlan>& plans, Rank& rank) {
  std::vector<cr_program*> programs;
  for (const WholePlan& p : plans) programs.push_back(make_program(cr_comm_collectives(rank.comm), p.programs[rank.rank]));
  return programs;
}

void close_all(World& world, Rank& rank) {
  int code = cr_comm_close(rank.comm, TIMEOUT_S);
  CHECK(code == CR_OK, "closing answers %d", code);
  world.meeting.wait();
}

// ---- blocking collectives --------------------------------------------------------------------------------------------

void run_plans(const Job& job, const std::vector<WholePlan>& plans, bool one_engine, bool small = false) {
  World world(options_of(job, one_engine, small));
  world.run([&](Rank& rank) {
    std::vector<cr_program*> programs = programs_of(plans, rank);
    world.meeting.wait();
    for (u64 step = 0; step < job.steps; step++) {
      Random common = random_of(job.seed, step), own = random_of(job.seed, step, rank.rank + 1);
      u64 which = step < plans.size() ? (step + job.seed) % plans.size() : common.below(plans.size());
      Step s = random_step(plans[which], common, 320 << 10);
      Buffers buffers(s, rank, rank.rank, place_in(step % 4, 4, own));
      dawdle(own);
      const char* name = plans[which].name.c_str();
      int code = run_blocking(cr_comm_collectives(rank.comm), buffers.call(programs[which]), TIMEOUT_S);
      CHECK(code == CR_OK, "%s ends with %d at step %llu", name, code, step);
      buffers.check(name);
    }
    close_all(world, rank);
  });
}

// ---- threads ---------------------------------------------------------------------------------------------------------

enum { REGIONS = 16, IN_FLIGHT = 3 };
constexpr u64 MOST_BYTES = 60 << 10;

// A few operations of one thread, asynchronously: the oldest is waited for, or polled, when there are enough.
class Pipeline {
 public:
  Pipeline(Rank& rank, unsigned thread, u64 seed) : rank_(rank), thread_(thread), mood_(random_of(seed, rank.rank, 100 + thread)) {}
  void start(const WholePlan& p, const Step& s, unsigned place, cr_lane* lane, cr_program* program) {
    u64 at = place_in(thread_ * (IN_FLIGHT + 1) + started_++ % (IN_FLIGHT + 1), REGIONS, mood_);
    flying_.push_back(std::make_unique<Flight>(p.name.c_str(), s, rank_, place, at));
    flying_.back()->start(lane, program);
  }
  void finish(unsigned leave) {
    dawdle(mood_);
    for (; flying_.size() > leave; flying_.pop_front()) flying_.front()->finish(mood_.below(2));
  }

 private:
  Rank& rank_;
  unsigned thread_, started_ = 0;
  Random mood_;
  std::deque<std::unique_ptr<Flight>> flying_;
};

// Collectives from several threads of a rank start in the same order on every rank, and are waited for in any.
struct Order {
  std::mutex lock;
  u64 step = 0;
};

void collectives(const Job& job, const std::vector<WholePlan>& plans, const std::vector<cr_program*>& programs, Rank& rank,
                 Order& order, unsigned thread) {
  Pipeline pipeline(rank, thread, job.seed);
  for (bool more = true; more;) {
    {
      std::lock_guard<std::mutex> hold(order.lock);
      more = order.step < job.steps;
      if (!more) break;
      Random common = random_of(job.seed, order.step++);
      u64 which = common.below(plans.size());
      Step s = random_step(plans[which], common, MOST_BYTES);
      pipeline.start(plans[which], s, rank.rank, cr_comm_collectives(rank.comm), programs[which]);
    }
    pipeline.finish(IN_FLIGHT);
  }
  pipeline.finish(0);
}

// Messages of every ordered pair that this rank sends, or receives: `sending` says which. Each pair has its own order.
void messages(const Job& job, const std::vector<WholePlan>& sends, Rank& rank, bool sending) {
  Pipeline pipeline(rank, sending ? 2 : 3, job.seed);
  std::vector<cr_lane*> lanes(job.ranks);
  std::vector<std::vector<cr_program*>> programs(job.ranks);
  for (unsigned peer = 0; peer < job.ranks; peer++) {
    if (peer == rank.rank) continue;
    lanes[peer] = cr_comm_pair(rank.comm, peer, sending);
    for (const WholePlan& p : sends) programs[peer].push_back(make_program(lanes[peer], p.programs[!sending]));
  }
  for (u64 message = 0; message < job.steps; message++)
    for (unsigned turn = 1; turn < job.ranks; turn++) {
      unsigned peer = (rank.rank + (sending ? turn : job.ranks - turn)) % job.ranks;
      unsigned from = sending ? rank.rank : peer, to = sending ? peer : rank.rank;
      Random common = random_of(job.seed + 1, from * job.ranks + to, message);
      u64 which = common.below(sends.size());
      Step s = random_step(sends[which], common, MOST_BYTES);
      pipeline.start(sends[which], s, !sending, lanes[peer], programs[peer][which]);
      pipeline.finish(IN_FLIGHT);
    }
  pipeline.finish(0);
}

void run_threads(const Job& job, const std::vector<WholePlan>& plans, const std::vector<WholePlan>& sends) {
  World world(options_of(job, false));
  world.run([&](Rank& rank) {
    std::vector<cr_program*> programs = programs_of(plans, rank);
    CHECK(cr_engine_progress_thread(rank.engine) == CR_OK, "no progress thread");
    world.meeting.wait();
    Order order;
    std::thread others[] = {std::thread([&] { collectives(job, plans, programs, rank, order, 0); }),
                            std::thread([&] { messages(job, sends, rank, true); }),
                            std::thread([&] { messages(job, sends, rank, false); })};
    collectives(job, plans, programs, rank, order, 1);
    for (std::thread& other : others) other.join();
    close_all(world, rank);
  });
}

// ---- trouble ---------------------------------------------------------------------------------------------------------

struct Trouble {
  int wanted;           // how every operation under way ends
  bool disagree, stay_away;
  double timeout_s;
};

// The last rank makes trouble in the middle of a run of operations.
void meet(const Job& job, const WholePlan& p, const Trouble& trouble) {
  World world(options_of(job, false));
  unsigned maker = job.ranks - 1;
  world.run([&](Rank& rank) {
    cr_program* program = make_program(cr_comm_collectives(rank.comm), p.programs[rank.rank]);
    world.meeting.wait();
    int code = CR_OK;
    std::thread aborter;
    if (rank.rank == maker && trouble.wanted == CR_ABORTED)
      aborter = std::thread([&] {
        usleep(2000 + (unsigned)(job.seed % 7) * 500);
        cr_comm_abort(rank.comm);
      });
    for (u64 step = 0; code == CR_OK; step++) {
      bool last = rank.rank == maker && step == 5;
      if (last && trouble.stay_away) break;
      Step s{};
      s.collective = p.collective, s.dtype = INT32, s.ranks = job.ranks, s.count = last && trouble.disagree ? 101 : 100, s.salt = step;
      Buffers buffers(s, rank, rank.rank, 0);
      code = run_blocking(cr_comm_collectives(rank.comm), buffers.call(program), trouble.timeout_s);
      if (code == CR_OK) buffers.check(p.name.c_str());
    }
    bool away = rank.rank == maker && trouble.stay_away;
    CHECK(away || code == trouble.wanted || code == CR_CLOSED, "%s: rank %u ends with %d, not %d", p.name.c_str(), rank.rank, code, trouble.wanted);
    cr_failure failure;
    cr_comm_failure(rank.comm, &failure);
    CHECK(away || (int)failure.code == trouble.wanted, "rank %u: failure %u, not %d", rank.rank, failure.code, trouble.wanted);
    world.meeting.wait();
    if (aborter.joinable()) aborter.join();
    cr_comm_close(rank.comm, 1);
    world.meeting.wait();
  });
}

void run_trouble(const Job& job, const std::vector<WholePlan>& plans) {
  for (const WholePlan& p : plans) {
    if (p.collective != ALL_REDUCE_ || p.needs & ~(MAPPED_NEED | SWITCH_NEED) || p.ranks < 2) continue;
    meet(job, p, {CR_ABORTED, false, false, TIMEOUT_S});
    meet(job, p, {CR_MISMATCH, true, false, TIMEOUT_S});
    meet(job, p, {CR_TIMEOUT, false, true, 0.05});
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 6, "harness MODE PLANS RANKS SEED STEPS");
  std::string mode = argv[1];
  Job job{argv[2], (unsigned)atoi(argv[3]), strtoull(argv[4], nullptr, 10), strtoull(argv[5], nullptr, 10), !mode.find("stream")};
  std::vector<WholePlan> all = read_plans(job.plans, job.ranks);
  if (job.streams) all = some_of(all, [](const WholePlan& p) { return !p.needs; });
  std::vector<WholePlan> plans = some_of(all, [](const WholePlan& p) { return p.collective != SEND_; });
  if (mode == "plans" || mode == "streams" || mode == "shared") run_plans(job, plans, mode == "shared");
  else if (mode == "scratch") run_plans(job, some_of(plans, leaves_scratch), false, true);
  else if (mode == "threads" || mode == "stream-threads") run_threads(job, plans, some_of(all, [](const WholePlan& p) { return p.collective == SEND_; }));
  else if (mode == "trouble" || mode == "stream-trouble") run_trouble(job, plans);
  else CHECK(false, "no mode %s", argv[1]);
  printf("%s: %u ranks, seed %llu, %zu plans: all right\n", argv[1], job.ranks, job.seed, plans.size());
  return 0;
}
