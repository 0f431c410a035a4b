"""Published figures of GPUs, one a line, so that a GPU that is not here can be asked about.

name | arch | SMs | L2 MiB | GB/s | FP8 | BF16 TFLOP/s | memory GiB | source | short names

`device.py` reads it into `CATALOGUE`. The surprise: marketing peaks are sparse, and GeForce cards
run FP8 and BF16 at half rate with fp32 accumulation; here peaks are dense and with fp32
accumulation. `-` is a figure without a public source. MI250X is counted per die, as torch shows it;
SMs are compute units on AMD. Short names come on top of those derived from the name.
"""

ROWS = """
NVIDIA T4 | sm_75 | 40 | 4 | 320 | - | 65 | 16 | T4 datasheet (FP16 peak) |
NVIDIA A100-SXM4-40GB | sm_80 | 108 | 40 | 1555 | - | 312 | 40 | A100 datasheet | a100-40gb
NVIDIA A100-SXM4-80GB | sm_80 | 108 | 40 | 2039 | - | 312 | 80 | A100 datasheet | a100 a100-80gb a100-sxm
NVIDIA A100-PCIE-40GB | sm_80 | 108 | 40 | 1555 | - | 312 | 40 | A100 datasheet |
NVIDIA A100 80GB PCIe | sm_80 | 108 | 40 | 1935 | - | 312 | 80 | A100 datasheet | a100-pcie a100-pcie-80gb
NVIDIA A800-SXM4-80GB | sm_80 | 108 | 40 | 2039 | - | 312 | 80 | A800 datasheet | a800 a800-sxm
NVIDIA A800 80GB PCIe | sm_80 | 108 | 40 | 1935 | - | 312 | 80 | A800 datasheet | a800-pcie
NVIDIA A30 | sm_80 | 56 | 24 | 933 | - | 165 | 24 | A30 datasheet |
NVIDIA A10 | sm_86 | 72 | 6 | 600 | - | 125 | 24 | A10 datasheet |
NVIDIA A10G | sm_86 | 80 | 6 | 600 | - | 70 | 24 | A10G datasheet |
NVIDIA A40 | sm_86 | 84 | 6 | 696 | - | 149.7 | 48 | A40 datasheet |
NVIDIA RTX A6000 | sm_86 | 84 | 6 | 768 | - | 154.8 | 48 | GA102 whitepaper | a6000
NVIDIA GeForce RTX 3090 | sm_86 | 82 | 6 | 936 | - | 71 | 24 | GA102 whitepaper |
NVIDIA GeForce RTX 3090 Ti | sm_86 | 84 | 6 | 1008 | - | 80 | 24 | Ada whitepaper |
Orin | sm_87 | 16 | 4 | 204.8 | - | - | 64 | Jetson AGX Orin datasheet | jetson-orin agx-orin
NVIDIA L4 | sm_89 | 58 | 48 | 300 | 242 | 121 | 24 | L4 datasheet |
NVIDIA L20 | sm_89 | 92 | 96 | 864 | 239 | 119.5 | 48 | L20 datasheet |
NVIDIA L40 | sm_89 | 142 | 96 | 864 | 362 | 181 | 48 | L40 datasheet |
NVIDIA L40S | sm_89 | 142 | 96 | 864 | 733 | 362 | 48 | L40S datasheet |
NVIDIA GeForce RTX 4090 | sm_89 | 128 | 72 | 1008 | 330.3 | 165.2 | 24 | Ada whitepaper |
NVIDIA GeForce RTX 4090 D | sm_89 | 114 | 72 | 1008 | 294.2 | 147.1 | 24 | product page; Ada whitepaper rate at 114 SMs |
NVIDIA GeForce RTX 4080 | sm_89 | 76 | 64 | 716.8 | 194.9 | 97.5 | 16 | Ada whitepaper |
NVIDIA RTX 6000 Ada Generation | sm_89 | 142 | 96 | 960 | 728.5 | 364.2 | 48 | Ada whitepaper | rtx6000ada
NVIDIA H100 80GB HBM3 | sm_90 | 132 | 50 | 3350 | 1979 | 989.5 | 80 | H100 datasheet | h100 h100-sxm h100-sxm5
NVIDIA H100 PCIe | sm_90 | 114 | 50 | 2000 | 1513 | 756 | 80 | H100 whitepaper |
NVIDIA H100 NVL | sm_90 | 132 | - | 3900 | 1671 | 835.5 | 94 | H100 NVL datasheet |
NVIDIA H800 | sm_90 | 132 | 50 | 3350 | 1979 | 989.5 | 80 | H800 datasheet | h800-sxm
NVIDIA H800 PCIe | sm_90 | 114 | 50 | 2000 | 1513 | 756 | 80 | H800 datasheet |
NVIDIA H20 | sm_90 | 78 | 60 | 4000 | 296 | 148 | 96 | H20 datasheet |
NVIDIA H20-3e | sm_90 | 78 | 60 | - | 296 | 148 | 141 | H20 datasheet (compute) |
NVIDIA L20Y | sm_90 | - | - | - | - | - | 80 | no datasheet |
NVIDIA H200 | sm_90 | 132 | 60 | 4800 | 1979 | 989.5 | 141 | H200 datasheet | h200-sxm
NVIDIA H200 NVL | sm_90 | 132 | 60 | 4800 | 1671 | 835.5 | 141 | H200 NVL datasheet |
NVIDIA GH200 480GB | sm_90 | 132 | - | 4000 | 1979 | 989.5 | 96 | GH200 datasheet | gh200
NVIDIA GH200 144G HBM3e | sm_90 | 132 | - | 4900 | 1979 | 989.5 | 144 | GH200 datasheet |
NVIDIA B200 | sm_100 | 148 | 126 | 8000 | 4500 | 2250 | 180 | DGX B200 datasheet / 8; Blackwell tuning guide (L2) |
NVIDIA GB200 | sm_100 | 152 | 126 | 8000 | 5000 | 2500 | 186 | GB200 NVL72 datasheet / 72 |
NVIDIA B300 SXM6 AC | sm_103 | 148 | - | 8000 | 4500 | 2250 | 270 | HGX B300 datasheet / 8 | b300
NVIDIA GB300 | sm_103 | 152 | - | 8000 | 5000 | 2500 | 279 | GB300 NVL72 datasheet / 72 |
NVIDIA Thor | sm_110 | 20 | - | 273 | 517 | - | 128 | Jetson AGX Thor datasheet | jetson-thor agx-thor
NVIDIA GeForce RTX 5090 | sm_120 | 170 | 96 | 1792 | 419 | 209.5 | 32 | RTX Blackwell whitepaper |
NVIDIA GeForce RTX 5080 | sm_120 | 84 | 64 | 960 | 225.1 | 112.6 | 16 | RTX Blackwell whitepaper |
NVIDIA RTX PRO 6000 Blackwell Workstation Edition | sm_120 | 188 | 128 | 1792 | 1007.6 | 503.8 | 96 | RTX PRO Blackwell whitepaper | rtx-pro-6000-ws
NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition | sm_120 | 188 | 128 | 1792 | - | - | 96 | RTX PRO Blackwell whitepaper | rtx-pro-6000-maxq
NVIDIA RTX PRO 6000 Blackwell Server Edition | sm_120 | 188 | 128 | 1597 | - | - | 96 | RTX PRO 6000 server datasheet | rtx-pro-6000-server
NVIDIA GB10 | sm_121 | 48 | - | 273 | - | - | 128 | DGX Spark datasheet | dgx-spark
AMD Instinct MI210 | gfx90a | 104 | 8 | 1638.4 | - | 181 | 64 | MI210 datasheet |
AMD Instinct MI250X | gfx90a | 110 | 8 | 1638.4 | - | 191.5 | 64 | MI250X datasheet / 2 dies |
AMD Instinct MI300A | gfx942 | 228 | 24 | 5300 | 1961 | 980.6 | 128 | MI300A datasheet |
AMD Instinct MI300X | gfx942 | 304 | 32 | 5300 | 2614.9 | 1307.4 | 192 | MI300X datasheet | mi300x-oam
AMD Instinct MI308X | gfx942 | 80 | - | 5300 | - | - | 192 | MI308X product page |
AMD Instinct MI325X | gfx942 | 304 | 32 | 6000 | 2614.9 | 1307.4 | 256 | MI325X datasheet | mi325-oam mi325x-oam
AMD Instinct MI350X | gfx950 | 256 | 32 | 8000 | 4614 | 2307 | 288 | MI350X datasheet | mi350-oam mi350x-oam
AMD Instinct MI355X | gfx950 | 256 | 32 | 8000 | 5033 | 2516.6 | 288 | MI355X datasheet | mi355-oam mi355x-oam
AMD Radeon RX 7900 XTX | gfx1100 | 96 | 6 | 960 | - | 122.8 | 24 | Radeon RX 7900 XTX product page |
AMD Radeon 8060S Graphics | gfx1151 | 40 | 2 | 256 | - | - | - | Ryzen AI Max+ 395 product page | strix-halo
AMD Radeon RX 9070 XT | gfx1201 | 64 | 8 | 640 | 389 | 195 | 16 | Radeon RX 9070 XT product page |
AMD Radeon AI PRO R9700 | gfx1201 | 64 | 8 | 640 | 383 | 191 | 32 | Radeon AI PRO R9700 product page | r9700
"""  # noqa: E501
