//! Enables the fuzz targets, which are a part of no other build.

fn main() {
    println!("cargo::rustc-cfg=fuzz_targets");
    println!("cargo::rerun-if-changed=build.rs");
}
