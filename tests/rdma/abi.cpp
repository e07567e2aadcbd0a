// Compiled only: that commrt/_native/ib_abi.h says of libibverbs what its own header does.
#include <infiniband/verbs.h>

#include "../../commrt/_native/ib_abi.h"

namespace ib = commrt::ib;

#define SIZE(mine, theirs) static_assert(sizeof(ib::mine) == sizeof(theirs) && alignof(ib::mine) == alignof(theirs))
#define FIELD(mine, m, theirs, t)                                       \
  static_assert(offsetof(ib::mine, m) == offsetof(theirs, t) &&         \
                sizeof(((ib::mine*)nullptr)->m) == sizeof(((theirs*)nullptr)->t))
#define SAME(mine, theirs, f) FIELD(mine, f, theirs, f)

SAME(Device, ibv_device, node_type);
SAME(Device, ibv_device, transport_type);

SIZE(Context, ibv_context);
SAME(Context, ibv_context, ops);
SAME(Context, ibv_context, num_comp_vectors);
SAME(Context, ibv_context, mutex);
SIZE(ContextOps, ibv_context_ops);
SAME(ContextOps, ibv_context_ops, poll_cq);
SAME(ContextOps, ibv_context_ops, req_notify_cq);
SAME(ContextOps, ibv_context_ops, post_send);
SAME(ContextOps, ibv_context_ops, post_recv);

SIZE(Mr, ibv_mr);
SAME(Mr, ibv_mr, addr);
SAME(Mr, ibv_mr, length);
SAME(Mr, ibv_mr, lkey);
SAME(Mr, ibv_mr, rkey);

SAME(Cq, ibv_cq, context);
SAME(Cq, ibv_cq, cqe);
SAME(Qp, ibv_qp, context);
SAME(Qp, ibv_qp, send_cq);
SAME(Qp, ibv_qp, qp_num);
SAME(Qp, ibv_qp, state);
SAME(Qp, ibv_qp, qp_type);

SIZE(Sge, ibv_sge);
SAME(Sge, ibv_sge, length);
SAME(Sge, ibv_sge, lkey);
SIZE(SendWr, ibv_send_wr);
SAME(SendWr, ibv_send_wr, next);
SAME(SendWr, ibv_send_wr, sg_list);
SAME(SendWr, ibv_send_wr, num_sge);
SAME(SendWr, ibv_send_wr, opcode);
SAME(SendWr, ibv_send_wr, send_flags);
SAME(SendWr, ibv_send_wr, imm_data);
FIELD(SendWr, rdma.remote_addr, ibv_send_wr, wr.rdma.remote_addr);
FIELD(SendWr, rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SIZE(RecvWr, ibv_recv_wr);
SAME(RecvWr, ibv_recv_wr, num_sge);

SIZE(Wc, ibv_wc);
SAME(Wc, ibv_wc, status);
SAME(Wc, ibv_wc, opcode);
SAME(Wc, ibv_wc, imm_data);
SAME(Wc, ibv_wc, byte_len);
SAME(Wc, ibv_wc, wc_flags);

SIZE(QpCap, ibv_qp_cap);
SAME(QpCap, ibv_qp_cap, max_inline_data);
SIZE(QpInitAttr, ibv_qp_init_attr);
SAME(QpInitAttr, ibv_qp_init_attr, send_cq);
SAME(QpInitAttr, ibv_qp_init_attr, cap);
SAME(QpInitAttr, ibv_qp_init_attr, qp_type);
SAME(QpInitAttr, ibv_qp_init_attr, sq_sig_all);
SIZE(GlobalRoute, ibv_global_route);
SAME(GlobalRoute, ibv_global_route, sgid_index);
SAME(GlobalRoute, ibv_global_route, hop_limit);
SIZE(AhAttr, ibv_ah_attr);
SAME(AhAttr, ibv_ah_attr, dlid);
SAME(AhAttr, ibv_ah_attr, is_global);
SAME(AhAttr, ibv_ah_attr, port_num);
SIZE(QpAttr, ibv_qp_attr);
SAME(QpAttr, ibv_qp_attr, path_mtu);
SAME(QpAttr, ibv_qp_attr, rq_psn);
SAME(QpAttr, ibv_qp_attr, sq_psn);
SAME(QpAttr, ibv_qp_attr, dest_qp_num);
SAME(QpAttr, ibv_qp_attr, qp_access_flags);
SAME(QpAttr, ibv_qp_attr, ah_attr);
SAME(QpAttr, ibv_qp_attr, pkey_index);
SAME(QpAttr, ibv_qp_attr, max_rd_atomic);
SAME(QpAttr, ibv_qp_attr, max_dest_rd_atomic);
SAME(QpAttr, ibv_qp_attr, min_rnr_timer);
SAME(QpAttr, ibv_qp_attr, port_num);
SAME(QpAttr, ibv_qp_attr, timeout);
SAME(QpAttr, ibv_qp_attr, retry_cnt);
SAME(QpAttr, ibv_qp_attr, rnr_retry);
SIZE(PortAttr, ibv_port_attr);
SAME(PortAttr, ibv_port_attr, state);
SAME(PortAttr, ibv_port_attr, active_mtu);
SAME(PortAttr, ibv_port_attr, gid_tbl_len);
SAME(PortAttr, ibv_port_attr, max_msg_sz);
SAME(PortAttr, ibv_port_attr, lid);
SAME(PortAttr, ibv_port_attr, link_layer);

#define CONSTANT(name) static_assert((long long)ib::name == (long long)IBV_##name)
CONSTANT(NODE_CA);
CONSTANT(QPT_RC);
CONSTANT(PORT_ACTIVE);
CONSTANT(LINK_LAYER_ETHERNET);
CONSTANT(QPS_INIT);
CONSTANT(QPS_RTR);
CONSTANT(QPS_RTS);
CONSTANT(WR_RDMA_WRITE);
CONSTANT(WR_RDMA_WRITE_WITH_IMM);
CONSTANT(WC_SUCCESS);
CONSTANT(WC_RECV);
CONSTANT(WC_RECV_RDMA_WITH_IMM);
CONSTANT(SEND_SIGNALED);
CONSTANT(SEND_INLINE);
CONSTANT(ACCESS_LOCAL_WRITE);
CONSTANT(ACCESS_REMOTE_WRITE);
CONSTANT(ACCESS_REMOTE_READ);
CONSTANT(QP_STATE);
CONSTANT(QP_ACCESS_FLAGS);
CONSTANT(QP_PKEY_INDEX);
CONSTANT(QP_PORT);
CONSTANT(QP_AV);
CONSTANT(QP_PATH_MTU);
CONSTANT(QP_TIMEOUT);
CONSTANT(QP_RETRY_CNT);
CONSTANT(QP_RNR_RETRY);
CONSTANT(QP_RQ_PSN);
CONSTANT(QP_MAX_QP_RD_ATOMIC);
CONSTANT(QP_MIN_RNR_TIMER);
CONSTANT(QP_SQ_PSN);
CONSTANT(QP_MAX_DEST_RD_ATOMIC);
CONSTANT(QP_DEST_QPN);
