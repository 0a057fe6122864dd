//! Sets the `cfg` that compiles the fuzz targets into the transport crate. No other build of the crate has them.

fn main() {
    println!("cargo::rustc-cfg=fuzz_targets");
    println!("cargo::rerun-if-changed=build.rs");
}
