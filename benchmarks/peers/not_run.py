"""Communicating kernels that no adapter runs yet, with what stands in the way of each."""

from __future__ import annotations

_THREADS = (
    "loops per thread, or exchanges values between the threads of a warp: the simulator runs a "
    "program's threads together"
)
_OWN = "vectors, multimem or TMA by functions of its compiler that have no stand-in"
_MODEL = "needs what other kernels of a whole model prepare: routing, attention, grouped products"
_PRODUCT = "a product that signals each tile to a reduction or a copy: no adapter for that"
_LOCAL = "atomics or assembly inside one GPU only: no other rank takes part"
NOT_RUN: dict[str, dict[str, list[str]]] = {
    "ByteDance-Seed/Triton-distributed": {
        _THREADS: [
            "cp_from_recv_buf", "all_to_all_v_2d_kernel", "all_to_all_v_2d_kernel_v2",
            "all_to_all_v_2d_inter_node_kernel", "kernel_all2all_push_intra_node_nvl",
        ],
        _OWN: [
            "allreduce_one_shot_tma_push_intra_node_kernel",
            "allreduce_two_shot_multimem_st_intra_node_kernel",
            "allreduce_one_shot_multimem_intra_node_kernel",
            "allreduce_two_shot_multimem_intra_node_kernel", "consumer_all_reduce_kernel",
            "_forward_push_2d_ll_kernel", "_forward_push_2d_ll_multimem_kernel",
            "_forward_push_3d_kernel", "_forward_push_numa_2d_ll_kernel",
            "_forward_push_numa_2d_ll_multinode_kernel",
            "reduce_scatter_ring_push_1d_intra_node_rma_kernel (its arithmetic on a pointer does "
            "not compile either)",
        ],
        _PRODUCT: [
            "kernel_all_to_all_gemm_consumer", "kernel_persistent_gemm_notify",
            "kernel_persistent_tma_gemm_notify (two files)",
            "kernel_fused_gemm_allreduce", "kernel_gemm_rs_producer_persistent_reduce_st",
            "kernel_gemm_rs_producer_persistent", "kernel_gemm_rs_producer_non_persistent",
            "matmul_kernel and matmul_kernel_descriptor_persistent (gemm, Ulysses: three files)",
            "kernel_all2all_pull_intra_node_nvl",
        ],
        _MODEL: [
            "kernel_dispatch_token", "kernel_combine_token",
            "kernel_get_ag_splits_and_recv_offset (two files)",
            "kernel_get_ag_splits_and_recv_offset_intra_node", "kernel_get_dispatch_send_reqs",
            "kernel_consumer_m_parallel_scatter_group_gemm",
            "kernel_gqa_fwd_batch_decode_split_kv_persistent", "reduce_topk_allreduce_kernel",
            "reduce_topk_reduce_scatter_a2a_intra_node_kernel",
            "reduce_topk_reduce_scatter_ring_intra_node_kernel",
            "calc_gather_scatter_index_v2_kernel", "all_gather_push_2d_kernel",
            "kernel_consumer_flash_attn_forward (two files)", "kernel_pre_attn_qkv_pack_a2a",
            "moe_gather_ar_grouped_gemm_kernel", "moe_gather_ar_grouped_gemm_persistent_kernel",
            "moe_gather_rs_grouped_gemm_kernel", "moe_gather_rs_grouped_gemm_persistent_kernel",
        ],
        _LOCAL: [
            "_threadblock_complex_swizzle_run", "_threadblock_naive_swizzle_run",
            "_threadblock_swizzle_run", "threadblock_swizzle_ag_moe_kernel",
            "calc_sorted_gather_index_kernel", "calc_gather_scatter_index_kernel",
            "kernel_bincount", "reduce_1d_persistent_kernel",
            "transposed_moe_grouped_gemm_kernel_nk_const_persistent_dynamic",
        ],
    },
}  # fmt: skip
