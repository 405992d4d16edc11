"""Kernels for NVIDIA Hopper (sm_90), written in Gluon: warp-specialized, with TMA and wgmma."""
