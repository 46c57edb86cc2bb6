use super::*;

fn choose(candidates: &[(u32, u32, u32, u64)]) -> Option<usize> {
    let id = ProviderId::new("p").unwrap();
    let candidates: Vec<_> = candidates
        .iter()
        .map(|&(in_use, capacity, weight, last_admission)| FreeCandidate {
            provider: &id,
            in_use,
            capacity,
            weight,
            last_admission,
        })
        .collect();
    LeastLoaded.choose(&candidates)
}

#[test]
fn the_least_loaded_relative_to_places_and_weight_wins() {
    // SEL-1
    assert_eq!(choose(&[]), None);
    assert_eq!(choose(&[(3, 8, 1, 0), (2, 4, 1, 0)]), Some(0), "3/8 is less than 2/4");
    assert_eq!(choose(&[(2, 8, 1, 0), (2, 8, 3, 0)]), Some(1), "the heavier one takes more");
    assert_eq!(choose(&[(0, 1, 1, 7), (0, 9, 1, 5)]), Some(1), "equals take turns");
    assert_eq!(choose(&[(u32::MAX - 1, u32::MAX, u32::MAX, 0), (0, 1, 1, 0)]), Some(1), "nothing overflows");
}
