"""Measure error and speed of --fast_image_decoding against the exact path: python run/dev/measure_decoding.py"""

import argparse

from benchmark.decoding_speed import PHOTO_SIZES, measure_decoding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num_images", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=30.0, help="for every size")
    args = parser.parse_args()
    print("size            ratio    mean  max (of 255)   LLaVA    ours    fast /s   over LLaVA   over ours")
    for name, sizes in (
        ("as COCO's", PHOTO_SIZES),
        ("1920 x 1080", ((1920, 1080),)),
        ("4000 x 3000", ((4000, 3000),)),
    ):
        for ratio, found in measure_decoding(args.num_images, args.seconds, 0, sizes).items():
            llava, over = found.get("llava_per_s", float("nan")), found.get("fast_over_llava", float("nan"))
            print(
                f"{name:15} {ratio:7} {found['mean_error']:6.3f} {found['max_error']:4} {llava:16.1f} "
                f"{found['ours_per_s']:7.1f} {found['fast_per_s']:7.1f} {over:12.2f} {found['fast_over_ours']:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
