// The part of libibverbs' stable ABI (libibverbs.so.1) that ib.cpp uses, so that building needs no header of it. Names and
// layouts are those of <infiniband/verbs.h> without the prefix; tests/rdma/abi.cpp compares the two where that is installed.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

namespace commrt::ib {

enum : int { NODE_CA = 1, QPT_RC = 2 };
enum : int { PORT_ACTIVE = 4 };
enum : int { LINK_LAYER_ETHERNET = 2 };
enum : int { QPS_INIT = 1, QPS_RTR = 2, QPS_RTS = 3 };
enum : int { WR_RDMA_WRITE = 0, WR_RDMA_WRITE_WITH_IMM = 1 };
enum : int { WC_SUCCESS = 0, WC_RECV = 128, WC_RECV_RDMA_WITH_IMM = 129 };
enum : unsigned { SEND_SIGNALED = 2, SEND_INLINE = 8 };
enum : int { ACCESS_LOCAL_WRITE = 1, ACCESS_REMOTE_WRITE = 2, ACCESS_REMOTE_READ = 4 };
enum : int {
  QP_STATE = 1 << 0, QP_ACCESS_FLAGS = 1 << 3, QP_PKEY_INDEX = 1 << 4, QP_PORT = 1 << 5, QP_AV = 1 << 7, QP_PATH_MTU = 1 << 8,
  QP_TIMEOUT = 1 << 9, QP_RETRY_CNT = 1 << 10, QP_RNR_RETRY = 1 << 11, QP_RQ_PSN = 1 << 12, QP_MAX_QP_RD_ATOMIC = 1 << 13,
  QP_MIN_RNR_TIMER = 1 << 15, QP_SQ_PSN = 1 << 16, QP_MAX_DEST_RD_ATOMIC = 1 << 17, QP_DEST_QPN = 1 << 20
};

struct Pd;
struct Srq;
struct Channel;
struct Context;
struct Cq;
struct Qp;
struct SendWr;
struct RecvWr;
struct Wc;

struct Device {  // its beginning
  void* ops[2];
  int node_type;
  int transport_type;
};

// What the inline functions of the header call: ibv_poll_cq, ibv_post_send and ibv_post_recv.
struct ContextOps {
  void* others_1[11];
  int (*poll_cq)(Cq*, int, Wc*);
  int (*req_notify_cq)(Cq*, int);
  void* others_2[12];
  int (*post_send)(Qp*, SendWr*, SendWr**);
  int (*post_recv)(Qp*, RecvWr*, RecvWr**);
  void* others_3[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd, async_fd, num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};

struct Cq {  // its beginning
  Context* context;
  Channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
};

struct Qp {  // its beginning
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  uint32_t handle, qp_num;
  int state, qp_type;
};

struct Sge {
  uint64_t addr;
  uint32_t length, lkey;
};

struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  int opcode;
  unsigned send_flags;
  uint32_t imm_data;  // in network byte order
  struct {
    uint64_t remote_addr;
    uint32_t rkey;
  } rdma;
  uint64_t others[9];
};

struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

struct Wc {
  uint64_t wr_id;
  int status, opcode;
  uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp;
  unsigned wc_flags;
  uint16_t pkey_index, slid;
  uint8_t sl, dlid_path_bits;
};

struct QpCap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct QpInitAttr {
  void* qp_context;
  Cq *send_cq, *recv_cq;
  Srq* srq;
  QpCap cap;
  int qp_type, sq_sig_all;
};

struct GlobalRoute {
  union {
    uint8_t raw[16];
    uint64_t aligned[2];
  } dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct QpAttr {
  int qp_state, cur_qp_state, path_mtu, path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt,
      rnr_retry, alt_port_num, alt_timeout;
  uint32_t rate_limit;
};

struct PortAttr {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
  uint16_t port_cap_flags2;
};

// The exported functions, by their names behind "ibv_".
struct Verbs {
  Device** (*get_device_list)(int*);
  void (*free_device_list)(Device**);
  const char* (*get_device_name)(Device*);
  Context* (*open_device)(Device*);
  int (*close_device)(Context*);
  int (*query_port)(Context*, uint8_t, PortAttr*);
  int (*query_gid)(Context*, uint8_t, int, uint8_t*);
  Pd* (*alloc_pd)(Context*);
  int (*dealloc_pd)(Pd*);
  Mr* (*reg_mr)(Pd*, void*, size_t, int);
  int (*dereg_mr)(Mr*);
  Cq* (*create_cq)(Context*, int, void*, Channel*, int);
  int (*destroy_cq)(Cq*);
  Qp* (*create_qp)(Pd*, QpInitAttr*);
  int (*modify_qp)(Qp*, QpAttr*, int);
  int (*destroy_qp)(Qp*);
  const char* (*wc_status_str)(int);
  int (*fork_init)();
};

}  // namespace commrt::ib
