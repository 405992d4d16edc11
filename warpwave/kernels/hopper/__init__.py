"""Kernels for NVIDIA Hopper (sm_90), written in Gluon: warp-specialised, with TMA and wgmma."""
