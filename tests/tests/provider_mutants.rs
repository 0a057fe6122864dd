//! Runs the suite of the `Provider` contract on providers with planted defects, and checks that it finds each defect.

use rdma_reactor_tests::contract::mutant;
use rdma_reactor_tests::mutant::Defect;
use rdma_transport::conformance::run;

#[test]
fn a_provider_without_a_defect_passes() {
    let failures = run(&mutant(Defect::None), "");
    assert!(failures.is_empty(), "{failures:?}");
}

#[test]
fn each_defect_is_found() {
    let mut missed = Vec::new();
    let mut table = String::new();
    for defect in Defect::ALL {
        let failures = run(&mutant(defect), "");
        let cases: Vec<_> = failures.iter().map(|failure| failure.case).collect();
        table += &format!("{defect:?}: {}\n", cases.join(", "));
        if cases.is_empty() {
            missed.push(defect);
        }
    }
    println!("{table}");
    assert!(missed.is_empty(), "not found: {missed:?}");
}
