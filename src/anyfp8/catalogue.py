"""Published figures of GPUs, one a line, so that a GPU that is not here can be asked about.

name | arch | SMs | L2 MiB | GB/s | FP8 | BF16 TFLOP/s | memory GiB | source | short names

`device.py` reads it into `CATALOGUE`. The surprise: marketing peaks are sparse, and GeForce cards
run FP8 and BF16 at half rate with fp32 accumulation; here peaks are dense and with fp32
accumulation. `-` is a figure that no public document was found to state, never a guess.
"SMs x MHz x FLOP" in a source is how a peak follows from a stated clock (BF16 FLOP a clock and
SM; FP8 is twice that); "driver" is what the GPU itself reports where no document states it.
MI250X is counted per die, as torch shows it; SMs are compute units on AMD. Short names come on top
of those derived from the name.
"""

ROWS = """
NVIDIA T4 | sm_75 | 40 | 4 | 320 | - | 65 | 16 | sysrqmts.com Tesla T4 (FP16 peak) |
NVIDIA A100-SXM4-40GB | sm_80 | 108 | 40 | 1555 | - | 312 | 40 | NVIDIA A100 datasheet; Ampere whitepaper | a100-40gb
NVIDIA A100-SXM4-80GB | sm_80 | 108 | 40 | 2039 | - | 312 | 80 | NVIDIA A100 datasheet; Ampere whitepaper | a100 a100-80gb a100-sxm
NVIDIA A100-PCIE-40GB | sm_80 | 108 | 40 | 1555 | - | 312 | 40 | NVIDIA A100 40GB PCIe product brief; Ampere whitepaper |
NVIDIA A100 80GB PCIe | sm_80 | 108 | 40 | 1935 | - | 312 | 80 | NVIDIA A100 datasheet; Ampere whitepaper | a100-pcie a100-pcie-80gb
NVIDIA A800-SXM4-80GB | sm_80 | 108 | 40 | 2039 | - | 312 | 80 | A100 datasheet; the A800 differs in NVLink only (aiwiki.ai) | a800 a800-sxm
NVIDIA A800 80GB PCIe | sm_80 | 108 | 40 | 1935 | - | 312 | 80 | A100 datasheet; the A800 differs in NVLink only (aiwiki.ai) | a800-pcie
NVIDIA A30 | sm_80 | 56 | - | 933 | - | 165 | 24 | NVIDIA A30 datasheet; SMs: driver |
NVIDIA A10 | sm_86 | 72 | 6 | 600 | - | 125 | 24 | NVIDIA A10 datasheet; sysrqmts.com (SMs, L2) |
NVIDIA A10G | sm_86 | 80 | - | 600 | - | - | 24 | baseten.co A10 and A10G; SMs: driver; stated peaks contradict each other |
NVIDIA A40 | sm_86 | 84 | 6 | 696 | - | 149.7 | 48 | NVIDIA A40 datasheet; topcpu.net (L2) |
NVIDIA RTX A6000 | sm_86 | 84 | 6 | 768 | - | 154.8 | 48 | NVIDIA Ampere GA102 whitepaper v2; sysrqmts.com (L2) | a6000
NVIDIA GeForce RTX 3090 | sm_86 | 82 | 6 | 936 | - | 71 | 24 | NVIDIA Ampere GA102 whitepaper |
NVIDIA GeForce RTX 3090 Ti | sm_86 | 84 | 6 | 1008 | - | 80 | 24 | NVIDIA Ada whitepaper; peak: SMs x 1860 MHz x 512 FLOP |
Orin | sm_87 | 16 | 4 | 204.8 | - | - | 64 | NVIDIA Jetson AGX Orin technical brief | jetson-orin agx-orin
NVIDIA L4 | sm_89 | 58 | 48 | 300 | 242.5 | 121 | 24 | NVIDIA L4 datasheet; fpsbench.com (SMs, L2) |
NVIDIA L20 | sm_89 | 92 | 96 | 864 | 239 | 119.5 | 48 | topcpu.net; peaks as measured cuBLAS bounds them (LeetCUDA) |
NVIDIA L40 | sm_89 | 142 | 96 | 864 | 362 | 181 | 48 | NVIDIA L40 datasheet; topcpu.net (L2) |
NVIDIA L40S | sm_89 | 142 | 96 | 864 | 733 | 362 | 48 | NVIDIA L40S datasheet; L2: driver |
NVIDIA GeForce RTX 4090 | sm_89 | 128 | 72 | 1008 | 330.3 | 165.2 | 24 | NVIDIA Ada and RTX Blackwell whitepapers |
NVIDIA GeForce RTX 4090 D | sm_89 | 114 | 72 | 1008 | 294.2 | 147.1 | 24 | hmc-tech.com RTX 4090 D |
NVIDIA GeForce RTX 4080 | sm_89 | 76 | 64 | 716.8 | 194.9 | 97.5 | 16 | NVIDIA Ada whitepaper; 256 bit x 22.4 Gb/s; peaks: SMs x 2505 MHz x 512 FLOP |
NVIDIA RTX 6000 Ada Generation | sm_89 | 142 | 96 | 960 | 728.5 | 364.2 | 48 | NVIDIA RTX 6000 Ada datasheet (1457 sparse); peaks: SMs x 2505 MHz x 1024 FLOP | rtx6000ada
NVIDIA H100 80GB HBM3 | sm_90 | 132 | 50 | 3350 | 1979 | 989.5 | 80 | NVIDIA H100 datasheet; Hopper whitepaper | h100 h100-sxm h100-sxm5
NVIDIA H100 PCIe | sm_90 | 114 | 50 | 2000 | 1513 | 756 | 80 | NVIDIA H100 PCIe product brief; Hopper whitepaper |
NVIDIA H100 NVL | sm_90 | 132 | 60 | 3900 | 1670.5 | 835.5 | 94 | NVIDIA H100 NVL datasheet; SMs and L2: driver |
NVIDIA H800 | sm_90 | 132 | 50 | 3350 | 1979 | 989.5 | 80 | H100 datasheet; the H800 differs in NVLink and FP64 (philisun.com) | h800-sxm
NVIDIA H800 PCIe | sm_90 | 114 | 50 | 2000 | 1513 | 756 | 80 | H100 whitepaper; the H800 differs in NVLink and FP64 (philisun.com) |
NVIDIA H20 | sm_90 | 78 | 60 | 4000 | 296 | 148 | 96 | wallstreetcn.com, ke60.top (L2); SMs: driver |
NVIDIA H20-3e | sm_90 | 78 | - | - | 296 | 148 | 141 | peaks of the H20 at the same SMs; SMs: driver |
NVIDIA L20Y | sm_90 | - | - | - | - | - | 80 | no document found |
NVIDIA H200 | sm_90 | 132 | 60 | 4800 | 1979 | 989.5 | 141 | NVIDIA H200 datasheet; L2: driver | h200-sxm
NVIDIA H200 NVL | sm_90 | 132 | - | 4800 | 1670.5 | 835.5 | 141 | openmetal.io (bandwidth); peaks of the H100 NVL at the same SMs and 1785 MHz |
NVIDIA GH200 480GB | sm_90 | 132 | 60 | 4000 | 1979 | 989.5 | 96 | Wikipedia Hopper, nishikiout.net (bandwidth); peaks of the H100 SXM at the same SMs and clock; L2: driver | gh200
NVIDIA GH200 144G HBM3e | sm_90 | 132 | - | - | 1979 | 989.5 | 144 | Wikipedia Hopper; peaks of the H100 SXM at the same SMs and clock |
NVIDIA B200 | sm_100 | 148 | 126.5 | 7700 | 4500 | 2250 | 180 | NVIDIA Blackwell datasheet (HGX B200, one GPU); SMs and L2: driver |
NVIDIA GB200 | sm_100 | 152 | 126 | 8000 | 5000 | 2500 | 186 | NVIDIA Blackwell datasheet (GB200, one GPU); Blackwell tuning guide (L2); SMs: driver |
NVIDIA B300 SXM6 AC | sm_103 | 148 | 126.5 | 8000 | 4500 | 2250 | 268.6 | glennklockwood.com HGX B300; SMs, L2 and memory: driver | b300
NVIDIA GB300 | sm_103 | 152 | 129 | 8000 | 5000 | 2500 | 277.7 | GB300 NVL72 / 72 (glennklockwood.com), BF16 half of FP8; SMs and L2: driver |
NVIDIA Thor | sm_110 | 20 | 32 | 273 | 517 | 258.5 | 128 | NVIDIA developer forum (SMs, L2), Jetson Thor datasheet, BF16 half of FP8 (torring.dev) | jetson-thor agx-thor
NVIDIA GeForce RTX 5090 | sm_120 | 170 | 96 | 1792 | 419 | 209.5 | 32 | NVIDIA RTX Blackwell whitepaper v1.1 |
NVIDIA GeForce RTX 5080 | sm_120 | 84 | 64 | 960 | 225.1 | 112.6 | 16 | fpsbench.com RTX 5080; peaks: SMs x 2617 MHz x 512 FLOP |
NVIDIA RTX PRO 6000 Blackwell Workstation Edition | sm_120 | 188 | 128 | 1792 | 1007.6 | 503.8 | 96 | NVIDIA RTX PRO 6000 datasheet; hmc-tech.com (peaks) | rtx-pro-6000-ws
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition | sm_120 | 188 | 128 | 1792 | 877.8 | 438.9 | 96 | NVIDIA RTX PRO 6000 Max-Q datasheet (3511 TOPS of sparse FP4, / 4 and / 8) | rtx-pro-6000-maxq
NVIDIA RTX PRO 6000 Blackwell Server Edition | sm_120 | 188 | 128 | 1597 | 935.6 | 467.8 | 96 | NVIDIA RTX PRO 6000 Server datasheet; product brief SP-12355: SMs x 2430 MHz x 1024 FLOP; L2: driver | rtx-pro-6000-server
NVIDIA GB10 | sm_121 | 48 | 24 | 273 | - | - | 128 | Hot Chips 2025 GB10 (L2), DGX Spark datasheet; no dense peak stated | dgx-spark
AMD Instinct MI210 | gfx90a | 104 | 8 | 1638.4 | - | 181 | 64 | ROCm GPU specifications; peak: CUs x 1700 MHz x 1024 FLOP; half the HBM of an MI250X |
AMD Instinct MI250X | gfx90a | 110 | 8 | 1638.4 | - | 191.5 | 64 | ROCm GPU specifications; AMD MI250X datasheet / 2 dies |
AMD Instinct MI300A | gfx942 | 228 | 24 | 5300 | 1961 | 980.6 | 128 | ROCm GPU specifications; AMD MI300A datasheet; FP8: CUs x 2100 MHz x 4096 FLOP |
AMD Instinct MI300X | gfx942 | 304 | 32 | 5300 | 2614.9 | 1307.4 | 192 | ROCm GPU specifications; AMD MI300X datasheet | mi300x-oam
AMD Instinct MI308X | gfx942 | 80 | 16 | 5300 | - | - | 192 | CUs and 4 XCDs of 4 MiB L2: driver; no peak stated |
AMD Instinct MI325X | gfx942 | 304 | 32 | 6000 | 2614.9 | 1307.4 | 256 | ROCm GPU specifications; svethardware.cz: CUs x 2100 MHz x 2048 FLOP | mi325-oam mi325x-oam
AMD Instinct MI350X | gfx950 | 256 | 32 | 8000 | 4613.7 | 2306.9 | 288 | ROCm GPU specifications; wccftech.com Hot Chips 2025: CUs x 2200 MHz x 4096 FLOP | mi350-oam mi350x-oam
AMD Instinct MI355X | gfx950 | 256 | 32 | 8000 | 5033.2 | 2516.6 | 288 | ROCm GPU specifications; AMD MI355X brochure | mi355-oam mi355x-oam
AMD Radeon RX 7900 XTX | gfx1100 | 96 | 6 | 960 | - | 122.8 | 24 | ROCm GPU specifications; Wikipedia RDNA 3 |
AMD Radeon 8060S Graphics | gfx1151 | 40 | 2 | 256 | - | 59.4 | - | ROCm GPU specifications; 256 bit x 8 Gb/s; peak: CUs x 2900 MHz x 512 FLOP | strix-halo
AMD Radeon RX 9070 XT | gfx1201 | 64 | 8 | 640 | 389.3 | 194.6 | 16 | ROCm GPU specifications; purepc.pl: CUs x 2970 MHz x 1024 FLOP |
AMD Radeon AI PRO R9700 | gfx1201 | 64 | 8 | 640 | 382.7 | 191.4 | 32 | ROCm GPU specifications; 1531 TOPS of sparse INT4, / 4 and / 8 | r9700
"""  # noqa: E501 - a table
