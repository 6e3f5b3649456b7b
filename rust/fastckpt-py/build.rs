//! Refuses unsupported interpreters, before the compiler fails with an obscure error.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if pyo3_build_config::get().is_free_threaded() {
        println!(
            "cargo::error=fastckpt-io does not support free-threaded CPython (names such as 3.14t): it relies on the \
             GIL, and is built and tested only with it. Use the usual build of the same version of CPython, such as \
             python3.14 in place of python3.14t."
        );
    }
}
